"""``sametoken train eagle3``: the EAGLE-3 head as a trainable network, and its training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.ops.backend import RotaryTable
from sametoken.train.batches import DraftRows, padded_length
from sametoken.train.compute import generator_of
from sametoken.train.distillation import (
    DrafterResult,
    Material,
    Run,
    TrainingText,
    prepare_material,
    read_text,
    run,
)
from sametoken.train.llama import llama_config
from sametoken.train.objectives import HeadNetwork, HeadObjective, Unroll
from sametoken.train.options import Eagle3Options, LoopOptions
from sametoken.train.progress import Report
from sametoken.train.results import HeadLayout, training_in, write_head
from sametoken.train.target import FrozenTarget, TargetFiles, open_target, require_layers
from sametoken.train.token_map import coverage, frequent_tokens, membership, offsets_of
from sametoken.train.unrolled import UNROLLED, UnrolledKV, shifted

# Batches over which the scale of the target's states is measured.
_SCALE_BATCHES = 4


class Eagle3Layer(nn.Module):
    """The decoder layer of an EAGLE-3 head: attention reads the embedding beside the state."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * hidden, size, bias=False))
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: tuple[Tensor, Tensor], kv: UnrolledKV
    ) -> Tensor:
        """Two [B, L, hidden] to the residual stream, which the next step takes."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        mixed, _ = self.self_attn(x, position_embeddings=positions, unrolled_kv=kv)
        residual = (normed if self.norm_before_residual else hidden) + mixed
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Network(HeadNetwork):
    """A trainable EAGLE-3 head; ``models/heads/eagle3.py`` runs the result.

    Training-time test (Li et al., arXiv:2503.01840, section 3.2; SafeAILab/EAGLE
    ``eagle/traineagle3/cnets.py``; vllm-project/speculators ``models/eagle3/core.py``) unrolls
    the head over every position at once. At step s, row r stands for position r + s. It takes
    the token at r + s + 1 and, in place of the target's states, the output of row r at step
    s - 1. Its keys are those that drafting finds there: of rows 0 .. r at step 0, from the
    target's states, and of row r alone at steps 1 .. s.

    Args:
        config: sizes of the layer; ``vocab_size`` is the target's.
        draft_vocab_size: tokens that the head can propose.
        num_aux: the target's states that it reads.
        norm_before_residual: as in ``Eagle3Config``.
        rotary: cos and sin of every position, drafts included.

    Attributes:
        state_scale: [num_aux * hidden], a factor on the target's states that gives every
            channel the same size; ``export_tensors`` folds it into ``fc``.
    """

    state_scale: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        draft_vocab_size: int,
        num_aux: int,
        norm_before_residual: bool,
        rotary: RotaryTable,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(num_aux * hidden, hidden, bias=False)
        layer = llama_config(config, attn_implementation=UNROLLED)
        self.layers = nn.ModuleList([Eagle3Layer(layer, norm_before_residual=norm_before_residual)])
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self.register_buffer("state_scale", torch.ones(num_aux * hidden))
        # transformers' modules take cos and sin twice over, once for each half of a head.
        self._rotary = tuple(torch.cat((x, x), dim=-1)[None] for x in (rotary.cos, rotary.sin))

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, k: int
    ) -> Iterator[Tensor]:
        """See ``DraftModule``; ``states`` are [B, L, num_aux * hidden]."""
        (layer,) = self.layers
        hidden, kv = self.fc(states.float() * self.state_scale), UnrolledKV()
        num_rows = token_ids.shape[1]
        for step in range(k):
            embedded = embedding[shifted(token_ids, 1 + step)].to(hidden.dtype)
            cos, sin = (table[:, step : step + num_rows] for table in self._rotary)
            hidden = layer(embedded, hidden, (cos, sin), kv)
            yield self.norm(hidden)

    @property
    def draft_head(self) -> Tensor:
        """See ``HeadNetwork``."""
        return self.lm_head.weight

    def export_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights under the names of ``speculators``, on the host."""
        tensors = {name: value.detach().clone() for name, value in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] * self.state_scale
        return {name: value.to("cpu", dtype) for name, value in tensors.items()}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take exported weights back, so that measurements run the weights that were written."""
        self.state_scale.fill_(1.0)
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])


def train_eagle3(
    model: Path,
    output: Path,
    text: TrainingText,
    head: Eagle3Options,
    loop: LoopOptions,
    *,
    report: Callable[[Report], None],
    announce: Callable[[str], None],
) -> DrafterResult:
    """Train a head and write it; arguments and errors are as in ``train_draft``.

    Args:
        output: directory for the head, in the ``speculators`` layout, and its checkpoint.
        head: the head's sizes and the number of unrolled steps.
    """
    began = time.monotonic()
    settings = {"kind": "eagle3", "model": model.name} | asdict(head)
    with training_in(output, loop, settings) as compute:
        files, layers, layer = open_for_head(model, head)
        given = read_text(text, files.config, loop, layers)
        longest = padded_length(loop.longest(files.config.max_position_embeddings))
        target = FrozenTarget(files, compute, aux_layers=layers, max_positions=longest)
        material = prepare_material(
            target, given, len(layers), loop, compute, cache=head.cache_states, announce=announce
        )
        token_ids = frequent_tokens(material.counts, head.draft_vocab_size)
        covered = coverage(material.counts, token_ids)
        announce(f"{token_ids.shape[0]} draft tokens cover {100 * covered:.2f} % of the answers")
        network = _network(target, layer, token_ids, head, loop)
        _set_state_scale(network, material)
        layout = HeadLayout(
            layer=layer,
            draft_vocab_size=token_ids.shape[0],
            aux_layers=layers,
            norm_before_residual=head.norm_before_residual,
            verifier=model.name,
        )
        unroll = Unroll(head.ttt_steps, head.step_loss_decay)
        ready = Run(
            objective=HeadObjective(network, target, token_ids, unroll, compute),
            material=material,
            settings=settings,
            coverage=covered,
            write=lambda: _write(network, token_ids, layout, output),
        )
        return run(ready, output, report, began)


def open_for_head(
    model: Path, head: Eagle3Options
) -> tuple[TargetFiles, tuple[int, ...], ModelConfig]:
    """A target, the layers whose states the head reads, and the head's own; no weights are read.

    Raises:
        ConfigError: an option does not fit the target.
        CheckpointError: the target cannot be read.
        UnsupportedError: the target cannot be trained for.
    """
    files = open_target(model)
    layers, layer = head.layer_ids(files.config.num_layers), _layer_config(files.config, head)
    require_layers(layers, files.config)
    return files, layers, layer


def _write(network: Eagle3Network, token_ids: Tensor, layout: HeadLayout, output: Path) -> None:
    """Write the head in bf16; the network takes the rounded weights."""
    tensors = network.export_tensors(torch.bfloat16)
    network.take(tensors)
    tensors["d2t"] = offsets_of(token_ids)
    tensors["t2d"] = membership(token_ids, layout.layer.vocab_size)
    write_head(output, layout, tensors)


def _layer_config(config: ModelConfig, head: Eagle3Options) -> ModelConfig:
    num_kv_heads = head.num_kv_heads or config.num_kv_heads
    if config.num_heads % num_kv_heads:
        raise ConfigError(
            f"{config.num_heads} heads cannot share {num_kv_heads} key-value heads",
            f"set num_kv_heads to a divisor of {config.num_heads}",
        )
    if config.rope["rope_type"] == "divided":
        # They have no name in a head's config.json.
        raise UnsupportedError(
            "the target's rotary frequencies come from a GGUF file's divisors",
            "train from the Hugging Face checkpoint of the same model",
        )
    return replace(
        config,
        intermediate_size=head.intermediate_size or config.intermediate_size,
        num_kv_heads=num_kv_heads,
    )


def _network(
    target: FrozenTarget,
    config: ModelConfig,
    token_ids: Tensor,
    head: Eagle3Options,
    loop: LoopOptions,
) -> Eagle3Network:
    """A head with random weights; ``lm_head`` and the last norm begin as the target's."""
    device = target.embedding.device
    network = Eagle3Network(
        config,
        draft_vocab_size=token_ids.shape[0],
        num_aux=3,
        norm_before_residual=head.norm_before_residual,
        rotary=rotary_table(
            config.rope,
            head_dim=config.head_dim,
            max_positions=padded_length(loop.longest(config.max_position_embeddings))
            + head.ttt_steps,
            device=device,
        ),
    )
    generator = generator_of(loop.seed, "weights")
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        network.lm_head.weight.copy_(target.head[token_ids.to(device)])
        network.norm.weight.copy_(target.final_norm)
    return network.to(device)


@torch.no_grad()
def _set_state_scale(network: Eagle3Network, material: Material) -> None:
    """Scale every channel of the target's states to a mean square of 1 over trained rows."""
    batches = material.training_batches()
    total, count = torch.zeros_like(network.state_scale), 0
    for step in range(min(len(batches), _SCALE_BATCHES)):
        batch = batches.at(step)
        rows = DraftRows.of(batch).flat
        states = material.states.of(batch).auxiliary.flatten(0, 1)[rows].float()
        total += states.square().sum(0).to(total.device)
        count += rows.shape[0]
    network.state_scale.copy_((total / max(count, 1)).clamp(min=1e-6).rsqrt())

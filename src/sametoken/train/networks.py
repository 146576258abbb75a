"""Decoders to train, made of transformers' modules, and attention for unrolled draft heads.

A decoder is a Llama, or the Qwen3.5 hybrid with its multi-token-prediction (MTP) module.
Parameters have the names of published checkpoints (``model.*``, ``mtp.*``). The engine runs the
result with its own models; tests compare the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModel, LlamaConfig, Qwen3_5TextConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.rotary import LONGROPE, rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.heads.mtp import PREFIX
from sametoken.models.load.quantization import require_unquantized
from sametoken.models.loader import open_checkpoint
from sametoken.models.qwen3_5 import FULL, LINEAR, gated_delta_rule
from sametoken.train.compute import generator_of

HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
LLAMA = "LlamaForCausalLM"
UNROLLED = "sametoken_unrolled"
_NESTED = "model.language_model."
# The function in PyTorch, out of the wrapper that calls flash-linear-attention where that is
# installed: its kernels take no fp32 and no CPU.
_chunked_rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
# The parts of a layer in the order in which initial weights are drawn: a seed means this order.
_DRAWN = ("mlp", "self_attn", "dt_bias", "A_log", "in_proj", "conv1d", "out_proj")


@dataclass(slots=True)
class UnrolledKV:
    """Keys and values of every unrolled step so far, [B, kv_heads, L, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    unrolled_kv: UnrolledKV,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the steps of an unrolled head, as transformers' modules call it.

    The step's keys and values are added to ``unrolled_kv``. Row r reads those of rows 0 .. r at
    step 0, and of row r alone at later steps.

    Returns:
        [B, L, heads, head_dim], and no weights.
    """
    # Rotation leaves fp32 where autocast gave bf16 projections.
    query, key = query.to(value.dtype) * scaling, key.to(value.dtype)
    unrolled_kv.keys.append(key)
    unrolled_kv.values.append(value)
    keys, values = (
        [x[:, :, None] for x in part] for part in (unrolled_kv.keys, unrolled_kv.values)
    )
    q = torch.unflatten(query, 1, (key.shape[1], -1))
    num_rows = q.shape[-2]
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(future, -torch.inf)
    own = [(q * k).sum(-1, dtype=torch.float32) for k in keys[1:]]
    if own:
        scores = torch.cat((scores, torch.stack(own, dim=-1)), dim=-1)
    weights = scores.softmax(-1).to(q.dtype)
    attended = weights[..., :num_rows] @ values[0]
    for step, v in enumerate(values[1:]):
        attended = attended + weights[..., num_rows + step, None] * v
    return attended.flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(UNROLLED, unrolled_attention)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences from a state of zero, [B, L, Hv, Dv] fp32.

    Args:
        q, k: [B, L, Hk, Dk]; each is normalised and serves Hv / Hk adjacent value heads.
        v: [B, L, Hv, Dv].
        log_decay, beta: [B, L, Hv].
    """
    ratio = v.shape[2] // k.shape[2]
    q, k = (x.float().repeat_interleave(ratio, dim=2) for x in (q, k))
    read: Tensor
    read, _ = _chunked_rule(q, k, v.float(), g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return read


class GatedDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """transformers' block with the gated delta rule in fp32 and recomputed for gradients.

    Under autocast the original runs the products of the rule in bf16, and it keeps every chunk's
    matrices for the backward pass.
    """

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[B, L, hidden] to the same."""
        mixed = functional.pad(
            self.in_proj_qkv(hidden_states).transpose(1, 2), (self.conv_kernel_size - 1, 0)
        )
        mixed = functional.silu(functional.conv1d(mixed, self.conv1d.weight, groups=self.conv_dim))
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = torch.split(mixed.transpose(1, 2), sizes, dim=-1)
        q, k = (torch.unflatten(x, -1, (self.num_k_heads, -1)) for x in (q, k))
        v = torch.unflatten(v, -1, (self.num_v_heads, -1))
        steps = functional.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        log_decay = -self.A_log.float().exp() * steps
        beta = self.in_proj_b(hidden_states).float().sigmoid()
        with torch.autocast(hidden_states.device.type, enabled=False):
            read = checkpoint(
                delta_rule,
                q,
                k,
                v,
                log_decay,
                beta,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        gate = torch.unflatten(self.in_proj_z(hidden_states), -1, read.shape[-2:])
        output: Tensor = self.out_proj(self.norm(read, gate).flatten(2))
        return output


class MTPModule(nn.Module):
    """The multi-token-prediction module of Qwen3.5, as ``models/heads/mtp.py`` runs it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps)
        layer = _qwen3_5_config(config, [FULL], attn_implementation=UNROLLED)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(layer, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps)

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, rotary: nn.Module, k: int
    ) -> Iterator[Tensor]:
        """What logits are made from, [B, L, hidden], of each draft in turn.

        Args:
            embedding: [V, hidden], the target's.
            token_ids: [B, L] int64.
            states: [B, L, hidden], the target's after its final norm.
            rotary: the target's rotary embedding.
            k: drafts in a row, as in ``HeadNetwork.unroll``.
        """
        (layer,) = self.layers
        kv, hidden = UnrolledKV(), states
        rows = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        for step in range(k):
            embedded = functional.embedding(shifted(token_ids, 1 + step), embedding)
            parts = (
                self.pre_fc_norm_embedding(embedded.to(hidden.dtype)),
                self.pre_fc_norm_hidden(hidden),
            )
            residual = self.fc(torch.cat(parts, dim=-1))
            # Only the dtype of ``embedding`` counts here: fp32 even under autocast.
            positions = rotary(embedding, rows + step)
            hidden = self.norm(layer(residual, position_embeddings=positions, unrolled_kv=kv))
            yield hidden


class DecoderNetwork(nn.Module):
    """A decoder to train, in fp32; its matrices hold nothing before ``initialise`` or a load.

    Args:
        config: the architecture.
        mtp: with an MTP module.

    Raises:
        CheckpointError: the rotary settings or the sizes of a hybrid are impossible.
        UnsupportedError: the architecture, or this form of it, cannot be trained.
    """

    def __init__(self, config: ModelConfig, *, mtp: bool = False) -> None:
        super().__init__()
        if config.architecture not in (*HYBRIDS, LLAMA) or config.attention_bias:
            raise UnsupportedError(
                f"a {config.architecture} of this form cannot be trained",
                f"use one of {(*HYBRIDS, LLAMA)}, without biases",
            )
        is_hybrid = config.architecture in HYBRIDS
        if mtp and not is_hybrid:
            raise UnsupportedError(
                f"a {config.architecture} has no module for further tokens",
                f"use one of {HYBRIDS}",
            )
        if config.rope["rope_type"] == LONGROPE:
            raise UnsupportedError(
                "transformers chooses the frequencies of longrope by the running length, "
                "the engine does not",
                "use another model",
            )
        # The engine's own function refuses rotary settings that the engine cannot run.
        rotary_table(
            config.rope, head_dim=config.head_dim, max_positions=1, device=torch.device("cpu")
        )
        self.config = config
        with no_init_weights():
            if is_hybrid:
                self.model = AutoModel.from_config(_qwen3_5_config(config, layer_kinds(config)))
                for index, layer in enumerate(self.model.layers):
                    if hasattr(layer, "linear_attn"):
                        layer.linear_attn = GatedDeltaNet(self.model.config, index)
            else:
                self.model = AutoModel.from_config(llama_config(config))
        if mtp:
            self.mtp = MTPModule(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]."""
        weight: Tensor = self.model.embed_tokens.weight
        return weight

    @property
    def head(self) -> Tensor:
        """[V, hidden]; the embedding if the two are tied."""
        return self.embedding if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """[B, L] int64 to [B, L, hidden], after the final norm."""
        states: Tensor = self.model(input_ids=token_ids, use_cache=False).last_hidden_state
        return states

    def unroll(self, token_ids: Tensor, states: Tensor, k: int) -> Iterator[Tensor]:
        """The MTP module's drafts from states that ``forward`` returned; see ``MTPModule``."""
        return self.mtp.unroll(self.embedding, token_ids, states, self.model.rotary_emb, k)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw random weights that follow from the seed alone.

        Matrices are normal with deviation 0.02. Those that write to the residual stream are
        divided by the square root of twice the number of layers. The decays of Gated DeltaNet
        range from short to long, as its authors initialise them.
        """
        generator = generator_of(seed, "weights")
        shrink = (2 * self.config.num_layers) ** -0.5
        for name, parameter in in_drawing_order(self):
            if name.endswith("A_log"):
                parameter.uniform_(1.0, 16.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                # softplus(dt_bias) from 0.001 to 0.1, evenly in its logarithm.
                steps = parameter.uniform_(-6.9, -2.3, generator=generator).exp_()
                parameter.copy_(steps.expm1().log())
            elif name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif parameter.ndim > 1:
                ends = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(std=0.02 * (shrink if ends else 1.0), generator=generator)


@torch.no_grad()
def load_decoder(path: Path, *, mtp: bool = False) -> DecoderNetwork:
    """A decoder with a checkpoint's weights, in fp32; the MTP module's are left as constructed.

    Args:
        path: a checkpoint directory.
        mtp: with an MTP module.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config wants.
        UnsupportedError: the architecture cannot be trained.
    """
    opened = open_checkpoint(path)
    require_unquantized(opened.config.extra, str(path), "training")
    network = DecoderNetwork(opened.config, mtp=mtp)
    source = opened.open_tensors()
    names = set(source.names())
    for name, parameter in network.named_parameters():
        if name.startswith(f"{PREFIX}."):
            continue
        stored = name.replace("model.", _NESTED, 1)
        stored = stored if stored in names else name
        if stored not in names or source.shape(stored) != tuple(parameter.shape):
            raise CheckpointError(
                f"{path} holds no tensor {name} of shape {list(parameter.shape)}",
                "check that config and weights belong together",
            )
        parameter.copy_(torch.cat(list(source.chunks(stored))))
    return network


def in_drawing_order(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters in the order in which initial weights are drawn; see ``_DRAWN``."""
    layers: dict[str, int] = {}

    def place(name: str) -> tuple[int, int]:
        before, _, within = name.rpartition("layers.")
        index = layers.setdefault(f"{before}{within.partition('.')[0]}", len(layers))
        part = next((i for i, part in enumerate(_DRAWN) if f".{part}" in name), -1)
        return index, part

    return sorted(network.named_parameters(), key=lambda item: place(item[0]))


def layer_kinds(config: ModelConfig) -> list[str]:
    """The kind of each layer of a hybrid, as a config's ``layer_types`` names them."""
    implied = [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(config.num_layers)]
    named = config.extra.get("layer_types") or implied
    return [FULL if kind == FULL else LINEAR for kind in named]


def llama_config(config: ModelConfig, **options: Any) -> LlamaConfig:
    """transformers' config of a Llama of these sizes, without biases.

    Raises:
        UnsupportedError: transformers has no Llama of these sizes.
    """
    if config.hidden_size % config.num_heads:
        raise UnsupportedError(
            f"{config.num_heads} heads over {config.hidden_size} hidden elements are not possible "
            "in transformers' Llama",
            "use a hidden size that is a multiple of the number of heads",
        )
    return LlamaConfig(**_common(config), attention_bias=False, mlp_bias=False, **options)


def _qwen3_5_config(config: ModelConfig, kinds: list[str], **options: Any) -> Qwen3_5TextConfig:
    """transformers' config of a hybrid with layers of these kinds."""
    rule = gated_delta_rule(config, config.architecture)
    return Qwen3_5TextConfig(
        **_common(config) | {"num_hidden_layers": len(kinds)},
        layer_types=kinds,
        linear_num_key_heads=rule.num_key_heads,
        linear_num_value_heads=rule.num_value_heads,
        linear_key_head_dim=rule.key_dim,
        linear_value_head_dim=rule.value_dim,
        linear_conv_kernel_dim=rule.conv_kernel,
        **options,
    )


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope),
    }


def shifted(token_ids: Tensor, count: int) -> Tensor:
    """[B, L]: the tokens ``count`` positions later, zeros behind the last."""
    return functional.pad(token_ids[:, count:], (0, min(count, token_ids.shape[1])))

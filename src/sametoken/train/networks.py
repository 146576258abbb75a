"""Decoders to train, made of transformers' modules, and their multi-token-prediction modules.

Tensors have the names of published checkpoints (``model.*``, ``mtp.*``). The engine runs the
result with its own models; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.rotary import LONGROPE, rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.heads.mtp import PREFIX
from sametoken.models.load.quantization import require_unquantized
from sametoken.models.load.sources import TensorSource, require_finite
from sametoken.models.loader import open_checkpoint
from sametoken.train import nemotron_h, qwen3_5
from sametoken.train.compute import generator_of
from sametoken.train.llama import llama_model
from sametoken.train.unrolled import DraftModule
from sametoken.types.option_values import listed

# What published checkpoints of some families have in place of "model.".
_PREFIXES = ("model.", "model.language_model.", "backbone.")
# The parts of a layer in the order in which initial weights are drawn: a seed means this order.
_DRAWN = ("mlp", "self_attn", "dt_bias", "A_log", "in_proj", "conv1d", "out_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """How one family is made of transformers' modules.

    Attributes:
        model: the decoder without its lm_head, an ``nn.Module``.
        module: its MTP module; None: the family has none.
    """

    model: Callable[[ModelConfig], Any]
    module: Callable[[ModelConfig], DraftModule] | None = None


_QWEN3_5 = Family(qwen3_5.hybrid_model, qwen3_5.MTPModule)
FAMILIES = {
    "LlamaForCausalLM": Family(llama_model),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "NemotronHForCausalLM": Family(nemotron_h.hybrid_model, nemotron_h.MTPModule),
}
WITH_MODULE = tuple(name for name, family in FAMILIES.items() if family.module)


class DecoderNetwork(nn.Module):
    """A decoder to train, in fp32; its matrices hold nothing before ``initialise`` or a load.

    Made on the meta device, it refuses what it would refuse, and takes no memory.

    Args:
        config: the architecture.
        mtp: with an MTP module.

    Raises:
        CheckpointError: the rotary settings or the sizes of a hybrid are impossible.
        UnsupportedError: the architecture, or this form of it, cannot be trained.
    """

    model: Any
    mtp: DraftModule

    def __init__(self, config: ModelConfig, *, mtp: bool = False) -> None:
        super().__init__()
        family = FAMILIES.get(config.architecture)
        if family is None or config.attention_bias:
            raise UnsupportedError(
                f"a {config.architecture} of this form cannot be trained",
                f"use a {listed(FAMILIES)}, without biases",
            )
        if mtp and family.module is None:
            raise UnsupportedError(
                f"a {config.architecture} has no module for further tokens",
                f"use a {listed(WITH_MODULE)}",
            )
        if config.rope["rope_type"] == LONGROPE:
            raise UnsupportedError(
                "transformers chooses the frequencies of longrope by the running length, "
                "the engine does not",
                "use another model",
            )
        # The engine's own function refuses rotary settings that the engine cannot run; it looks at
        # values, which a network that is made on the meta device does not have.
        with torch.device("cpu") as cpu:
            rotary_table(config.rope, head_dim=config.head_dim, max_positions=1, device=cpu)
        self.config = config
        with no_init_weights():
            self.model = family.model(config)
        if mtp and family.module:
            self.mtp = family.module(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]."""
        embeddings: nn.Embedding = self.model.get_input_embeddings()
        return embeddings.weight

    @property
    def head(self) -> Tensor:
        """[V, hidden]; the embedding if the two are tied."""
        return self.embedding if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """[B, L] int64 to [B, L, hidden], after the final norm."""
        states: Tensor = self.model(input_ids=token_ids, use_cache=False).last_hidden_state
        return states

    def unroll(self, token_ids: Tensor, states: Tensor, k: int) -> Iterator[Tensor]:
        """The MTP module's drafts from states that ``forward`` returned; see ``DraftModule``."""
        return self.mtp.unroll(self.embedding, token_ids, states, k)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw random weights that follow from the seed alone.

        Matrices are normal with deviation 0.02. Those that write to the residual stream are
        divided by the square root of twice the number of layers. The decays of recurrent layers
        range from short to long, as their authors initialise them.
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
            elif name.endswith("conv1d.bias"):
                parameter.zero_()
            elif name.endswith("mixer.D"):
                parameter.fill_(1.0)
            elif parameter.ndim > 1:
                # Of experts one tensor holds all, and its name ends in the projection's.
                written = name.removesuffix(".weight")
                ends = written.endswith(("o_proj", "out_proj", "down_proj"))
                parameter.normal_(std=0.02 * (shrink if ends else 1.0), generator=generator)


def open_decoder(path: Path, *, mtp: bool) -> tuple[DecoderNetwork, TensorSource]:
    """A decoder for a checkpoint's weights, in fp32, and the weights, of which none is read.

    Args:
        path: a checkpoint directory.
        mtp: with an MTP module.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        UnsupportedError: the architecture cannot be trained, or the weights are quantized.
    """
    opened = open_checkpoint(path)
    require_unquantized(opened.config.extra, str(path), "training")
    return DecoderNetwork(opened.config, mtp=mtp), opened.open_tensors()


@torch.no_grad()
def load_weights(network: DecoderNetwork, source: TensorSource) -> None:
    """Read a decoder's weights; the MTP module's are left as constructed.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config wants, or is not
            finite.
    """
    for name, tensor in network.state_dict().items():
        if not name.startswith(f"{PREFIX}."):
            tensor.copy_(_read(source, name, tensor.shape))


def _read(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor under any of the names that checkpoints have for it, of one expert each too."""
    candidates = [name.replace(_PREFIXES[0], prefix, 1) for prefix in _PREFIXES]
    stored = next((one for one in candidates if one in source.names()), name)
    experts, dot, projection = name.rpartition(".experts.")
    if experts and stored not in source.names() and len(shape) == 3:
        one_by_one = (f"{experts}{dot}{index}.{projection}.weight" for index in range(shape[0]))
        return torch.stack([_read(source, one, shape[1:]) for one in one_by_one])
    if stored not in source.names() or source.shape(stored) != tuple(shape):
        raise CheckpointError(
            f"{source.location} holds no tensor {name} of shape {list(shape)}",
            "check that config and weights belong together",
        )
    tensor = torch.cat(list(source.chunks(stored)))
    require_finite(tensor, stored, source)
    return tensor


def in_drawing_order(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters in the order in which initial weights are drawn; see ``_DRAWN``."""
    layers: dict[str, int] = {}

    def place(name: str) -> tuple[int, int]:
        before, _, within = name.rpartition("layers.")
        index = layers.setdefault(f"{before}{within.partition('.')[0]}", len(layers))
        part = next((i for i, part in enumerate(_DRAWN) if f".{part}" in name), -1)
        return index, part

    return sorted(network.named_parameters(), key=lambda item: place(item[0]))

"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and limits.

Checkpoints store the experts' gate and up features in turn, and their matrices with the inputs
first, or in MXFP4 with the outputs first; GGUF files have a matrix and a bias for each projection.
All become [gate | up] with the outputs first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sametoken.layers.feed_forward import RoutedExperts
from sametoken.layers.residual import Block
from sametoken.layers.share import ExpertModules
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_gated_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.experts import summed_over_ranks
from sametoken.models.layer_types import FULL, SLIDING, WINDOWED
from sametoken.models.load.settings import MAX_EXPERTS, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import RotaryTable, Routing
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.weight import ClampedExperts, Weight

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssForCausalLM(Decoder):
    """The shared decoder with sinks, alternating windows, and experts in every layer."""

    layer_types = WINDOWED
    #: Layer types alone say which have windows.
    ignored = ("use_sliding_window",)
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "num_hidden_layers": 36,
        "num_experts": 128,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """YaRN, where a config has no rope settings; with empty ones, none is scaled."""
        given = settings.get("rope_scaling") or settings.get("rope_parameters")
        return {"rope_parameters": _YARN} if given is None else {}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``; without ``layer_types``, the first and every other window."""
        if not Settings(config.extra, location).names("layer_types"):
            types = [FULL if index % 2 else SLIDING for index in range(config.num_layers)]
            config = replace(config, extra={**config.extra, "layer_types": types})
        return super().caches_of(config, dtype, location)

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The mixture of experts at ``prefix``; ranks divide every expert."""
        settings = Settings(config.extra, weights.source.location)
        count = settings.integer("num_experts", most=MAX_EXPERTS)
        router = weights.linear(config.hidden_size, Part(f"{prefix}.router", count), bias=True)
        name = f"{prefix}.experts"
        is_separate = f"{name}.0.gate_proj.weight" in weights
        load = _separate_matrices if is_separate else _stacked_matrices
        gate_up, down, gate_up_bias, down_bias = load(config, weights, name, count)
        form = ClampedExperts(
            settings.number("swiglu_alpha"),
            settings.number("swiglu_limit"),
            gate_up_bias,
            # Ranks' partial sums are added, so one of them has the bias.
            down_bias if weights.parallel.rank == 0 else torch.zeros_like(down_bias),
        )
        own = weights.kernels.pack_experts(gate_up, down, form)
        sizes = count, config.hidden_size, config.intermediate_size
        experts = summed_over_ranks(weights, own, ExpertModules.of(name, *sizes, interleaved=True))
        # A softmax over the chosen logits is one over all, normalised.
        routing = Routing(min(settings.integer("num_experts_per_tok"), count), normalise=True)
        return RoutedExperts(weights.kernels, router, experts, routing)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        name = f"{self._prefix}.layers.{index}.self_attn.sinks"
        part = Part(name, self.config.num_heads, split=Split.ROWS)
        return replace(attention, sinks=weights.tensor(part, dtype=torch.float32))


class _Matrices(NamedTuple):
    """This rank's part of all experts, gate before up; biases are [E, 2I] and [E, H]."""

    gate_up: list[Weight]
    down: list[Weight]
    gate_up_bias: Tensor
    down_bias: Tensor


def _stacked_matrices(
    config: ModelConfig, weights: WeightReader, prefix: str, count: int
) -> _Matrices:
    hidden, size = config.hidden_size, config.intermediate_size
    own_size = size // weights.parallel.size
    # A rank's range of interleaved rows is the same range of gates and of ups.
    places = torch.arange(2 * own_size).view(2, own_size).T.flatten()
    gate_up_part = Part(f"{prefix}.gate_up_proj", 2 * size, places, Split.ROWS)
    gate_up = weights.packed_stack(count, hidden, gate_up_part, transposed=True)
    down_part = Part(f"{prefix}.down_proj", hidden, split=Split.COLUMNS)
    down = weights.packed_stack(count, size, down_part, transposed=True)
    gate_up_bias = Part(f"{prefix}.gate_up_proj_bias", count, split=Split.COLUMNS)
    down_bias = weights.tensor(Part(f"{prefix}.down_proj_bias", count), (hidden,))
    in_turn = weights.tensor(gate_up_bias, (2 * size,))
    separated = torch.cat((in_turn[:, ::2], in_turn[:, 1::2]), dim=1)
    return _Matrices(gate_up, down, separated, down_bias)


def _separate_matrices(
    config: ModelConfig, weights: WeightReader, prefix: str, count: int
) -> _Matrices:
    hidden, size = config.hidden_size, config.intermediate_size
    mlps = [load_gated_mlp(weights, f"{prefix}.{i}", hidden, size) for i in range(count)]
    gates, ups, downs = (
        [weights.tensor(replace(part, name=f"{prefix}.{i}.{part.name}.bias")) for i in range(count)]
        for part in (
            Part("gate_proj", size, split=Split.ROWS),
            Part("up_proj", size, split=Split.ROWS),
            Part("down_proj", hidden),
        )
    )
    return _Matrices(
        [mlp.gate_up.weight for mlp in mlps],
        [mlp.down.weight for mlp in mlps],
        torch.cat((torch.stack(gates), torch.stack(ups)), dim=1),
        torch.stack(downs),
    )

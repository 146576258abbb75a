"""Granite 3: Llama with four factors, on embeddings, scores, residual branches and logits.

Granite 4 has them too: its layers are Mamba-2 or attention, which its hybrids do not rotate, and
an MLP that is shared by all rows, alone or beside experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.layers.feed_forward import GatedMLP, LayerExperts, RoutedExperts, SparseMoE
from sametoken.layers.residual import Block, ScaledAfter
from sametoken.layers.rotary import no_rotation
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.experts import load_experts
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.settings import MAX_EXPERTS, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.models.mamba2 import (
    IMPLIED_SIZES,
    OF_FALCON,
    bamba_sizes,
    caches_by_type,
    divided_by_type,
    load_mamba2,
    shared_by_type,
    types_of_layers,
)
from sametoken.ops.backend import RotaryTable, Routing
from sametoken.ops.cache_types import Recurrent

#: Of both generations.
_FACTORS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


def _factor(config: ModelConfig, key: str) -> float:
    factor: float = config.extra[key]
    return factor


class GraniteForCausalLM(Decoder):
    """The shared decoder with the factors of ``*_multiplier``; logits are divided."""

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """See ``Decoder.renamed``; absent factors are 1."""
        return {key: settings.number(key, 1.0) for key in _FACTORS}

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, with its factor."""
        mlp = load_mlp(config, weights, prefix)
        return ScaledAfter(mlp, _factor(config, "residual_multiplier"))

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.compute_rank_logits``, divided by ``logits_scaling``."""
        return super().compute_rank_logits(hidden) / _factor(self.config, "logits_scaling")

    def _embed(self, token_ids: Tensor) -> Tensor:
        return super()._embed(token_ids) * _factor(self.config, "embedding_multiplier")

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        shape = replace(attention.shape, score_factor=_factor(self.config, "attention_multiplier"))
        scaled = replace(attention, shape=shape)
        return ScaledAfter(scaled, _factor(self.config, "residual_multiplier"))


def _load_shared(config: ModelConfig, weights: WeightReader, prefix: str) -> GatedMLP:
    """The MLP at ``prefix``: gate and up are stored as one, but not in GGUF files.

    Adapters know both by the checkpoint's name.
    """
    hidden = config.hidden_size
    size = Settings(config.extra, weights.source.location).integer("shared_intermediate_size")
    fused = Part(f"{prefix}.input_linear", 2 * size, split=Split.ROWS, output_sizes=(size, size))
    down = weights.row_parallel(size, Part(f"{prefix}.output_linear", hidden))
    halves = [Part(f"{prefix}.{one}_proj", size, split=Split.ROWS) for one in ("gate", "up")]
    if f"{halves[0].name}.weight" in weights:
        return GatedMLP(replace(weights.linear(hidden, *halves), parts=(fused,)), down)
    return GatedMLP(weights.linear(hidden, fused), down)


def _load_routed(config: ModelConfig, weights: WeightReader, prefix: str) -> RoutedExperts:
    """The router and the experts at ``prefix``; ranks divide every expert.

    Checkpoints have their own names, and transformers others in memory, as GGUF files have.
    """
    settings, hidden = Settings(config.extra, weights.source.location), config.hidden_size
    count = settings.integer("num_local_experts")
    router = "router" if f"{prefix}.router.weight" in weights else "router.layer"
    # A softmax over the chosen logits is one over all, normalised.
    routing = Routing(settings.integer("num_experts_per_tok"), normalise=True)
    return RoutedExperts(
        weights.kernels,
        weights.linear(hidden, Part(f"{prefix}.{router}", count)),
        _load_experts(config, weights, prefix, count),
        routing,
    )


def _load_experts(
    config: ModelConfig, weights: WeightReader, prefix: str, count: int
) -> LayerExperts:
    experts = f"{prefix}.experts"
    if any(f"{experts}.{one}" in weights for one in ("gate_up_proj", "0.gate_proj.weight")):
        return load_experts(config, weights, experts, count)
    stacks = f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"
    return load_experts(config, weights, experts, count, stacks=stacks)


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4: layers of two types; rotated only where ``position_embedding_type`` is "rope"."""

    layer_types = frozenset((FULL, LINEAR))
    ignored = OF_FALCON
    shared_sizes = staticmethod(shared_by_type)
    caches_of = staticmethod(caches_by_type)
    implied: ClassVar[Mapping[str, Any]] = {
        **IMPLIED_SIZES,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """See ``Decoder.renamed``; memory is planned by the larger of both kinds of MLP."""
        types = types_of_layers(settings)
        sizes = super().renamed(settings) | (bamba_sizes(settings) if LINEAR in types else {})
        shared = settings.integer("shared_intermediate_size")
        sizes |= {"layer_types": list(types), "intermediate_size": shared}
        if not settings.get("num_local_experts"):
            return sizes | {"num_experts_per_tok": None}
        own = settings.integer("intermediate_size")
        count = settings.integer("num_local_experts", most=MAX_EXPERTS)
        sizes["num_experts_per_tok"] = min(settings.integer("num_experts_per_tok"), count)
        return sizes | {"moe_intermediate_size": own, "intermediate_size": max(own, shared)}

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The shared MLP of the layer, beside experts if any, with its factor."""
        layer = prefix.removesuffix(".mlp")
        shared = _load_shared(config, weights, f"{layer}.shared_mlp")
        mlp: Block = shared
        if config.extra.get("num_local_experts"):
            mlp = SparseMoE(_load_routed(config, weights, f"{layer}.block_sparse_moe"), shared)
        return ScaledAfter(mlp, _factor(config, "residual_multiplier"))

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``, and of Mamba-2 its heads."""
        settings = Settings(config.extra, config.architecture)
        sizes = divided_by_type(config)
        sizes["shared_intermediate_size"] = settings.integer("shared_intermediate_size")
        if settings.get("num_local_experts"):
            return sizes | {"intermediate_size": settings.integer("moe_intermediate_size")}
        del sizes["intermediate_size"]
        return sizes

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        if self.config.extra.get("position_embedding_type") == "rope":
            return super()._rotaries(device)
        return (no_rotation(self._max_positions, device),) * self.config.num_layers

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        if not isinstance(self._declared[index], Recurrent):
            return super()._load_attention(weights, index, rotary)
        mamba = load_mamba2(self.config, weights, f"{self._prefix}.layers.{index}.mamba")
        return ScaledAfter(mamba, _factor(self.config, "residual_multiplier"))

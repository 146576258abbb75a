"""Weights of a mixture of experts, stored by expert or all in one tensor."""

from __future__ import annotations

from dataclasses import replace

from sametoken.kernels.weight import Experts
from sametoken.layers.sparse_moe import DividedExperts, SparseMoE
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import load_gated_mlp
from sametoken.models.settings import MAX_EXPERTS, Settings
from sametoken.models.weights import Part, Split, WeightReader


def load_sparse_moe(config: ModelConfig, weights: WeightReader, prefix: str) -> SparseMoE:
    """The mixture of experts at ``prefix``; ranks divide the inner features of every expert.

    None of it is quantized.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    weights = replace(weights, quantize_fp8=False)
    settings = Settings(config.extra, weights.source.location)
    num_experts = settings.integer("num_experts", most=MAX_EXPERTS)
    top_k = settings.integer("num_experts_per_tok")
    shared_size = settings.integer("shared_expert_intermediate_size")
    hidden = config.hidden_size
    return SparseMoE(
        kernels=weights.kernels,
        router=weights.linear(hidden, Part(f"{prefix}.gate", num_experts)),
        experts=_load_experts(settings, weights, f"{prefix}.experts", hidden),
        top_k=min(top_k, num_experts),
        normalise=bool(settings.get("norm_topk_prob", True)),
        shared=load_gated_mlp(weights, f"{prefix}.shared_expert", hidden, shared_size),
        shared_gate=weights.linear(hidden, Part(f"{prefix}.shared_expert_gate", 1)),
    )


def _load_experts(
    settings: Settings, weights: WeightReader, prefix: str, hidden: int
) -> Experts | DividedExperts:
    experts = _packed_experts(settings, weights, prefix, hidden)
    if weights.parallel.size == 1:
        return experts
    return DividedExperts(weights.kernels, weights.parallel, experts)


def _packed_experts(settings: Settings, weights: WeightReader, prefix: str, hidden: int) -> Experts:
    count, size = settings.integer("num_experts"), settings.integer("moe_intermediate_size")
    if f"{prefix}.gate_up_proj" in weights:
        fused = Part(f"{prefix}.gate_up_proj", 2 * size, split=Split.ROWS, runs=(size, size))
        gate_up = weights.packed_stack(count, hidden, fused)
        down_part = Part(f"{prefix}.down_proj", hidden, split=Split.COLUMNS)
        down = weights.packed_stack(count, size, down_part)
        return weights.kernels.pack_experts(gate_up, down)
    mlps = [load_gated_mlp(weights, f"{prefix}.{i}", hidden, size) for i in range(count)]
    return weights.kernels.pack_experts(
        [mlp.gate_up.weight for mlp in mlps], [mlp.down.weight for mlp in mlps]
    )

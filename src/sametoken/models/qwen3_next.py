"""Qwen3-Next: projections into Gated DeltaNet are interleaved by key head."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.gated_delta_rule.rule import GatedDelta
from sametoken.layers.linear import Linear
from sametoken.models.hybrid import HybridDecoder
from sametoken.models.weights import Part, Split, WeightReader


class Qwen3NextForCausalLM(HybridDecoder):
    """The shared hybrid with ``in_proj_qkvz`` and ``in_proj_ba``."""

    @staticmethod
    def load_projection(
        rule: GatedDelta, weights: WeightReader, prefix: str, in_features: int
    ) -> Linear:
        """As ``HybridDecoder.load_projection``."""
        size = weights.parallel.size
        groups, ratio = rule.num_key_heads // size, rule.num_value_heads // rule.num_key_heads
        values = ratio * rule.value_dim
        qkvz = _regrouped(groups, (rule.key_dim, rule.key_dim, values, values))
        ba = _regrouped(groups, (ratio, ratio))
        return weights.linear(
            in_features,
            Part(f"{prefix}.in_proj_qkvz", size * len(qkvz), qkvz, Split.ROWS),
            Part(f"{prefix}.in_proj_ba", size * len(ba), ba, Split.ROWS),
        )


def _regrouped(num_groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Where rows go: from parts of ``sizes`` in every group to each part of all groups."""
    groups = torch.arange(num_groups * sum(sizes)).view(num_groups, sum(sizes))
    stored = torch.cat([part.flatten() for part in groups.split(sizes, dim=1)])
    return stored.argsort()

"""Qwen3.5, dense and mixture of experts; of a model that also sees, its text decoder."""

from __future__ import annotations

from sametoken.kernels.gated_delta_rule.rule import GatedDelta
from sametoken.layers.linear import Linear
from sametoken.models.hybrid import HybridDecoder
from sametoken.models.weights import Part, Split, WeightReader


class Qwen3_5ForCausalLM(HybridDecoder):
    """The shared hybrid with one tensor for each of ``in_proj_qkv``, ``_z``, ``_b`` and ``_a``."""

    @staticmethod
    def load_projection(
        rule: GatedDelta, weights: WeightReader, prefix: str, in_features: int
    ) -> Linear:
        """As ``HybridDecoder.load_projection``."""
        heads, rows = rule.num_value_heads, Split.ROWS
        qkv = f"{prefix}.in_proj_qkv"
        return weights.linear(
            in_features,
            Part(qkv, rule.conv_channels, split=rows, runs=rule.qkv_sizes),
            Part(f"{prefix}.in_proj_z", rule.out_features, split=rows),
            Part(f"{prefix}.in_proj_b", heads, split=rows),
            Part(f"{prefix}.in_proj_a", heads, split=rows),
        )

"""Qwen3.5, dense and mixture of experts; of a model that also sees, its text decoder."""

from __future__ import annotations

from sametoken.layers.linear import Linear
from sametoken.models.hybrid import HybridDecoder
from sametoken.models.weights import Part, WeightReader
from sametoken.state.recurrent import RecurrentSpec


class Qwen3_5ForCausalLM(HybridDecoder):
    """The shared hybrid with one tensor for each of ``in_proj_qkv``, ``_z``, ``_b`` and ``_a``."""

    @staticmethod
    def load_projection(
        spec: RecurrentSpec, weights: WeightReader, prefix: str, in_features: int
    ) -> Linear:
        """The fused projection to [q | k | v | z | b | a] of the block at ``prefix``."""
        return weights.linear(
            in_features,
            Part(f"{prefix}.in_proj_qkv", spec.conv_channels),
            Part(f"{prefix}.in_proj_z", spec.num_value_heads * spec.value_dim),
            Part(f"{prefix}.in_proj_b", spec.num_value_heads),
            Part(f"{prefix}.in_proj_a", spec.num_value_heads),
        )

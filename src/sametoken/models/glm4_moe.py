"""GLM-4.5 and 4.6: a mixture of experts behind a sigmoid router, beside a shared expert.

The router is DeepSeek-V3's (``Routing``), in fp32. A NextN module
(``model.layers.{num_hidden_layers}.*``) is not read here but by ``models.heads.nextn``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from sametoken.layers.attention import Attention
from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import (
    Biases,
    load_attention,
    load_head_norms,
    load_mlp,
    rotary_of,
)
from sametoken.models.experts import divided_with_experts, grouped_routing, load_grouped
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader
from sametoken.models.nextn_target import NextNTarget
from sametoken.ops.backend import QKNorm


def _is_sparse(config: ModelConfig, index: int) -> bool:
    return index >= Settings(config.extra, config.architecture).count("first_k_dense_replace", 1)


class Glm4MoeForCausalLM(NextNTarget):
    """The shared decoder with half of each head rotated, and experts behind the first layers."""

    rotates_parts = True
    divided_sizes = staticmethod(partial(divided_with_experts, is_sparse=_is_sparse))
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
    }

    @staticmethod
    def biases(config: ModelConfig) -> Biases:
        """Of ``attention_bias``, on q, k and v alone."""
        return Biases(config.attention_bias, output=False)

    @staticmethod
    def load_qk_norm(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm | None:
        """The two norms of the attention block at ``prefix``, if the config has them."""
        is_normed = Settings(config.extra, config.architecture).switch("use_qk_norm")
        return load_head_norms(config, weights, prefix) if is_normed else None

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, dense or of experts."""
        if not _is_sparse(config, index):
            return load_mlp(config, weights, prefix)
        routing = grouped_routing(Settings(config.extra, weights.source.location))
        return load_grouped(config, weights, prefix, routing)

    @classmethod
    def load_module_attention(
        cls, config: ModelConfig, weights: WeightReader, prefix: str, max_positions: int
    ) -> Attention:
        """As ``NextNTarget.load_module_attention``."""
        rotary = rotary_of(config, max_positions, weights.device)
        qk_norm, biases = cls.load_qk_norm(config, weights, prefix), cls.biases(config)
        return load_attention(config, weights, prefix, rotary, qk_norm, biases=biases)

"""Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_head_norms, load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.experts import divided_with_experts, is_sparse, load_routed, softmax_routing
from sametoken.models.layer_types import WINDOWED
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3 with a mixture of experts, without a shared one, in all or some layers."""

    layer_types = WINDOWED
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    #: A window is that of all layers.
    ignored = ("max_window_layers", "layer_types")

    load_qk_norm = staticmethod(load_head_norms)
    divided_sizes = staticmethod(partial(divided_with_experts, is_sparse=is_sparse))

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, dense or of experts."""
        if not is_sparse(config, index):
            return load_mlp(config, weights, prefix)
        settings = Settings(config.extra, weights.source.location)
        routing = softmax_routing(settings, normalise=False)
        return load_routed(config, weights, prefix, routing)

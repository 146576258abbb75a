"""Qwen2-MoE and Qwen1.5-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.models.base import ModelConfig
from sametoken.models.blocks import Biases
from sametoken.models.decoder import Decoder
from sametoken.models.experts import divided_with_experts, is_sparse, load_dense_or_sparse
from sametoken.models.layer_types import FULL, SLIDING, WINDOWED
from sametoken.models.load.settings import MAX_LAYERS, Settings


class Qwen2MoeForCausalLM(Decoder):
    """The shared decoder with biases on q, k and v, and experts in all or some layers."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 16,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    }

    load_layer_mlp = staticmethod(load_dense_or_sparse)

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Windows in every other one of the first ``max_window_layers``, where they are used."""
        types = list(settings.names("layer_types"))
        if not types and settings.switch("use_sliding_window"):
            layers = range(settings.integer("num_hidden_layers", most=MAX_LAYERS))
            first = settings.count("max_window_layers")
            types = [FULL if index % 2 or index >= first else SLIDING for index in layers]
        return {"layer_types": types}

    @staticmethod
    def biases(config: ModelConfig) -> Biases:
        """Of ``qkv_bias``, on q, k and v alone."""
        return Biases(bool(config.extra["qkv_bias"]), output=False)

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``, of experts and of the dense layers that there are."""
        keys = ("moe_intermediate_size", "shared_expert_intermediate_size")
        return divided_with_experts(config, is_sparse, keys)

"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.experts import MIXTRAL, load_routed, mixtral_prefix, softmax_routing
from sametoken.models.layer_types import DIVIDING, WINDOWED
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader


class MixtralForCausalLM(Decoder):
    """The shared decoder with experts, and a window in all layers where there is one."""

    layer_types = WINDOWED
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    #: A window is that of all layers, and weights are always normalised.
    ignored = ("attention_bias", *DIVIDING, "norm_topk_prob")

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """The size of experts."""
        return {"moe_intermediate_size": settings.integer("intermediate_size")}

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The mixture of experts."""
        settings = Settings(config.extra, weights.source.location)
        routing = softmax_routing(settings, normalise=True)
        prefix = mixtral_prefix(weights, prefix)
        return load_routed(config, weights, prefix, routing, names=MIXTRAL)

"""MiniMax-M2: norms of q and k over all heads, half of each rotated, and a sigmoid router.

Its modules for more tokens (``model.layers.{num_hidden_layers}.*`` and on) are not read: trained
ones were not published (MiniMax-AI/MiniMax-M2#47).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import with_wide_norms
from sametoken.models.decoder import Decoder
from sametoken.models.experts import (
    MIXTRAL,
    UNGROUPED,
    grouped_routing,
    load_grouped,
    mixtral_prefix,
)
from sametoken.models.layer_types import REFUSED
from sametoken.models.load.settings import MAX_LAYERS, Settings, require_values
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable

#: Values that mean nothing else; others have no published checkpoint.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
}


class MiniMaxM2ForCausalLM(Decoder):
    """The shared decoder with wide norms, and with experts in every layer."""

    rotates_parts = True
    refused = (*REFUSED, "attention_bias", "attn_window_size", "shared_intermediate_size")
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
    }
    ignored = UNGROUPED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """The size of experts, and the part of a head that ``rotary_dim`` rotates.

        Raises:
            UnsupportedError: another router, other norms, or layers of linear attention.
        """
        require_values(settings, _ONLY)
        num_layers = settings.integer("num_hidden_layers", most=MAX_LAYERS)
        require_values(settings, {"attn_type_list": ([1] * num_layers,)})
        own: dict[str, Any] = {"moe_intermediate_size": settings.integer("intermediate_size")}
        if settings.get("rotary_dim") and settings.get("partial_rotary_factor") is None:
            part = settings.integer("rotary_dim") / settings.integer("head_dim")
            own["partial_rotary_factor"] = part
        return own

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The mixture of experts."""
        routing = grouped_routing(Settings(config.extra, weights.source.location))
        prefix, correction = mixtral_prefix(weights, prefix), "e_score_correction_bias"
        return load_grouped(config, weights, prefix, routing, correction, MIXTRAL)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        prefix = f"{self._prefix}.layers.{index}.self_attn"
        return with_wide_norms(attention, self.config, weights, prefix)

    def _unused(self) -> tuple[str, ...]:
        settings = Settings(self.config.extra, self.config.architecture)
        first, count = self.config.num_layers, settings.count("num_mtp_modules")
        modules = (f"model.layers.{first + index}." for index in range(count))
        return (*super()._unused(), *modules)

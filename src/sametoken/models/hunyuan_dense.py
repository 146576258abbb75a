"""Hunyuan, dense: Llama with norms of heads after RoPE, whose base a factor may stretch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.normed_attention import NormAfterRotation
from sametoken.layers.residual import Block
from sametoken.layers.rotary import DEFAULT_THETA, no_rotation
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import REFUSED
from sametoken.models.load.settings import MAX_HEAD_DIM, Settings
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import QKNorm, RotaryTable


class HunYuanDenseV1ForCausalLM(Decoder):
    """The shared decoder with norms ``query_layernorm`` and ``key_layernorm``."""

    #: Layers that share another's KV.
    refused = (*REFUSED, "use_cla")
    implied: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """With an ``alpha``, type "dynamic" is the default one with a larger base."""
        key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
        rope = Settings(settings.nested(key), settings.location)
        kind = rope.get("rope_type") or rope.get("type")
        if kind != "dynamic" or not rope.get("alpha"):
            return {}
        size = settings.integer("hidden_size") // settings.integer("num_attention_heads")
        head_dim = settings.integer("head_dim", max(size, 1), most=MAX_HEAD_DIM)
        theta = rope.number("rope_theta", settings.number("rope_theta", DEFAULT_THETA))
        stretched = theta * rope.number("alpha") ** (head_dim / max(head_dim - 2, 1))
        return {key: {"rope_type": "default", "rope_theta": stretched}}

    @staticmethod
    def load_qk_norm(config: ModelConfig, weights: WeightReader, prefix: str) -> QKNorm | None:
        """The two norms of the attention block at ``prefix``, unless the config has none."""
        if not Settings(config.extra, config.architecture).switch("use_qk_norm", default=True):
            return None
        names = (f"{prefix}.{name}_layernorm.weight" for name in ("query", "key"))
        q, k = (weights.vector(name, config.head_dim) for name in names)
        return QKNorm(q, k, config.rms_norm_eps)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        if attention.qk_norm is None:
            return attention
        return NormAfterRotation(attention, no_rotation(self._max_positions, weights.device))

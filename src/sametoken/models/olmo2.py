"""OLMo 2: norms after attention and MLP, none in front, and norms of q and k over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.residual import Block, NoNorm, NormedAfter
from sametoken.models.blocks import load_mlp, with_wide_norms
from sametoken.models.decoder import Decoder, DecoderLayer
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable


class Olmo2ForCausalLM(Decoder):
    """The shared decoder with norms in other places."""

    implied: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        prefix = f"{self._prefix}.layers.{index}"
        attention = self._load_attention(weights, index, rotary)
        after_attention = self._load_norm(weights, f"{prefix}.post_attention_layernorm")
        mlp = load_mlp(self.config, weights, f"{prefix}.mlp")
        after_mlp = self._load_norm(weights, f"{prefix}.post_feedforward_layernorm")
        return DecoderLayer(
            NoNorm(),
            NormedAfter(attention, after_attention),
            NoNorm(),
            NormedAfter(mlp, after_mlp),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        prefix = f"{self._prefix}.layers.{index}.self_attn"
        return with_wide_norms(attention, self.config, weights, prefix)

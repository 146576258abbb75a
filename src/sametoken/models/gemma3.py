"""Gemma 3's text decoder.

Five layers of six see a window, and those rotate by a base of their own. Blocks stand between two
norms, whose weights are stored as their difference from 1. Embeddings are multiplied by the root of
their width, rounded to their dtype. The MLP is gated by gelu; logits are capped softly where
``final_logit_softcapping`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from sametoken.layers.feed_forward import GeluMLP
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Block, DecoderLayer, NormedAfter
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_centred_head_norms, load_centred_norm, load_mlp
from sametoken.models.gemma import GemmaDecoder
from sametoken.models.layer_types import full_every
from sametoken.models.load.settings import Settings, require_rope_type
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable
from sametoken.ops.cache_types import LayerCache


class Gemma3ForCausalLM(GemmaDecoder):
    """Gemma's decoder with norms on both sides of blocks."""

    refused = ("attn_logit_softcapping", "use_bidirectional_attention")
    implied: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """No key.

        Raises:
            UnsupportedError: as ``require_rope_type``.
        """
        require_rope_type(settings)
        return {}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``; without ``layer_types``, every sixth layer sees all."""
        settings = Settings(config.extra, location)
        if not settings.names("layer_types"):
            every = settings.integer("sliding_window_pattern", 6)
            types = full_every(every, config.num_layers)
            config = replace(config, extra={**config.extra, "layer_types": types})
        return super().caches_of(config, dtype, location)

    load_qk_norm = staticmethod(load_centred_head_norms)

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        def norm(name: str) -> RMSNorm:
            return self._load_norm(weights, f"{prefix}.{name}_layernorm")

        prefix = f"{self._prefix}.layers.{index}"
        mlp = load_mlp(self.config, weights, f"{prefix}.mlp")
        return DecoderLayer(
            norm("input"),
            NormedAfter(self._load_attention(weights, index, rotary), norm("post_attention")),
            norm("pre_feedforward"),
            NormedAfter(GeluMLP(self.kernels, mlp.gate_up, mlp.down), norm("post_feedforward")),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        settings = Settings(self.config.extra, weights.source.location)
        factor = settings.number("query_pre_attn_scalar") ** -0.5
        return replace(attention, shape=replace(attention.shape, score_factor=factor))

    def _load_norm(self, weights: WeightReader, name: str) -> RMSNorm:
        return load_centred_norm(self.config, weights, name)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The same decoder, whose logits transformers does not cap beside an encoder of images."""

    ignored = (*Gemma3ForCausalLM.ignored, "final_logit_softcapping")

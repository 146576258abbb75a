"""Granite 3: Llama with four factors, on embeddings, scores, residual branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from sametoken.layers.residual import Block, ScaledAfter
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable


def _factor(config: ModelConfig, key: str) -> float:
    return Settings(config.extra, config.architecture).number(key, 1.0)


class GraniteForCausalLM(Decoder):
    """The shared decoder with the factors of ``*_multiplier``; logits are divided."""

    implied: ClassVar[Mapping[str, Any]] = {"attention_multiplier": 1.0}

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``, with its factor."""
        mlp = load_mlp(config, weights, prefix)
        return ScaledAfter(mlp, _factor(config, "residual_multiplier"))

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.compute_rank_logits``, divided by ``logits_scaling``."""
        return super().compute_rank_logits(hidden) / _factor(self.config, "logits_scaling")

    def _embed(self, token_ids: Tensor) -> Tensor:
        return super()._embed(token_ids) * _factor(self.config, "embedding_multiplier")

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        shape = replace(attention.shape, score_factor=_factor(self.config, "attention_multiplier"))
        scaled = replace(attention, shape=shape)
        return ScaledAfter(scaled, _factor(self.config, "residual_multiplier"))

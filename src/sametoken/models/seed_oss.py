"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.models.base import ModelConfig
from sametoken.models.blocks import Biases
from sametoken.models.decoder import Decoder


class SeedOssForCausalLM(Decoder):
    """The shared decoder with two switches for the biases of attention."""

    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
    }

    @staticmethod
    def biases(config: ModelConfig) -> Biases:
        """Of ``attention_bias`` on q, k and v, of ``attention_out_bias`` on the output."""
        return Biases(config.attention_bias, bool(config.extra["attention_out_bias"]))

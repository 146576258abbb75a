"""Qwen2 and Qwen2.5, the text decoders of Qwen2-VL and Qwen2.5-VL, and MiMo-7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.models.base import ModelConfig
from sametoken.models.blocks import Biases
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import WINDOWED


class Qwen2ForCausalLM(Decoder):
    """The shared decoder with biases on q, k and v, and sliding windows where they are used."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @staticmethod
    def biases(config: ModelConfig) -> Biases:
        """On q, k and v, whatever the config says."""
        return Biases(qkv=True, output=False)


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """The same decoder, with other defaults."""

    implied: ClassVar[Mapping[str, Any]] = {
        **Qwen2ForCausalLM.implied,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_window_layers": 80,
    }


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The same decoder; the tensors of its module for more tokens are read by ``heads.mtp``."""

    unused_prefixes = ("model.mtp_layers.",)

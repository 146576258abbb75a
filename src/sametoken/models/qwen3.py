"""Qwen3, dense, and the text decoder of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.models.blocks import load_head_norms
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import DIVIDING, WINDOWED


class Qwen3ForCausalLM(Decoder):
    """The shared decoder with sliding windows and an RMS norm on every head of q and k."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    load_qk_norm = staticmethod(load_head_norms)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """The same decoder without windows, and with another default."""

    implied: ClassVar[Mapping[str, Any]] = {**Qwen3ForCausalLM.implied, "rope_theta": 500_000.0}
    ignored = DIVIDING

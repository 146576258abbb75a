"""Llama 2 and 3 and equal architectures (SmolLM2), and Mistral: Llama with sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.models.decoder import WINDOWED, Decoder


class LlamaForCausalLM(Decoder):
    """The shared decoder."""


class MistralForCausalLM(Decoder):
    """The shared decoder with sliding windows in all or some layers."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

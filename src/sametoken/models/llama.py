"""Llama 2 and 3 and equal architectures (SmolLM2), and Mistral: Llama with sliding windows."""

from __future__ import annotations

from sametoken.models.decoder import WINDOWED, Decoder


class LlamaForCausalLM(Decoder):
    """The shared decoder."""


class MistralForCausalLM(Decoder):
    """The shared decoder with sliding windows in all or some layers."""

    layer_types = WINDOWED

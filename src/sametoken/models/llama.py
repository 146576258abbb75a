"""Llama 2 and 3, and equal architectures (SmolLM2)."""

from __future__ import annotations

from sametoken.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """The shared decoder."""

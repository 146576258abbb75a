"""Llama 2 and 3, and whatever computes the same: SmolLM2."""

from __future__ import annotations

from sametoken.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """The shared decoder as it is."""

"""Llama 2 and 3, and whatever computes the same: SmolLM2.

Mistral: Llama, of whose layers all or some may see no further back than a window.
"""

from __future__ import annotations

from sametoken.models.decoder import WINDOWED, Decoder


class LlamaForCausalLM(Decoder):
    """The shared decoder as it is."""


class MistralForCausalLM(Decoder):
    """The shared decoder, with windows."""

    layer_types = WINDOWED

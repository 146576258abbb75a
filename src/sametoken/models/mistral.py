"""Mistral: Llama, of whose layers all or some may see no further back than a window."""

from __future__ import annotations

from sametoken.models.decoder import WINDOWED, Decoder


class MistralForCausalLM(Decoder):
    """The shared decoder, with windows."""

    layer_types = WINDOWED

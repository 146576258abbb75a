"""Bamba: layers of Mamba-2 or attention, which rotates half of each head, before an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, ClassVar

import torch

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.residual import Block, DecoderLayer, Layer
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.settings import ANOTHER, COMPARE, MAX_LAYERS, Settings
from sametoken.models.load.weights import WeightReader
from sametoken.models.mamba2 import (
    IMPLIED_SIZES,
    OF_FALCON,
    bamba_sizes,
    caches_by_type,
    divided_by_type,
    load_mamba2,
    shared_by_type,
)
from sametoken.ops.backend import RotaryTable
from sametoken.ops.cache_types import LayerCache, Recurrent


class BambaForCausalLM(Decoder):
    """The shared decoder with attention in the layers of ``attn_layer_indices`` alone."""

    layer_types = frozenset((FULL, LINEAR))
    final_norm_name: ClassVar[str] = "final_layernorm"
    rotates_parts = True
    ignored = OF_FALCON
    divided_sizes = staticmethod(divided_by_type)
    shared_sizes = staticmethod(shared_by_type)
    implied: ClassVar[Mapping[str, Any]] = {
        **IMPLIED_SIZES,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """See ``Decoder.renamed``; whatever a config says, half of each head is rotated."""
        count = settings.integer("num_hidden_layers", most=MAX_LAYERS)
        found = settings.get("attn_layer_indices", [])
        few = isinstance(found, list) and len(found) <= count
        if not few or not all(type(index) is int for index in found):
            raise CheckpointError(
                f"{settings.location}: attn_layer_indices={short(found)} is no list of layers",
                COMPARE,
            )
        types = [FULL if index in found else LINEAR for index in range(count)]
        return bamba_sizes(settings) | {"layer_types": types, "partial_rotary_factor": 0.5}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``.

        Raises:
            UnsupportedError: ``attn_rotary_emb`` is another part of a head than transformers'.
        """
        part = int(config.rope["partial_rotary_factor"] * config.head_dim)
        given = Settings(config.extra, location).get("attn_rotary_emb", part)
        if given != part:
            raise UnsupportedError(
                f"{location}: attn_rotary_emb={short(given)} where {part} elements of a head are "
                "rotated is not supported",
                ANOTHER,
            )
        return caches_by_type(config, dtype, location)

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Layer:
        prefix = f"{self._prefix}.layers.{index}"
        return DecoderLayer(
            self._load_norm(weights, f"{prefix}.input_layernorm"),
            self._load_attention(weights, index, rotary),
            self._load_norm(weights, f"{prefix}.pre_ff_layernorm"),
            load_mlp(self.config, weights, f"{prefix}.feed_forward"),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        if not isinstance(self._declared[index], Recurrent):
            return super()._load_attention(weights, index, rotary)
        return load_mamba2(self.config, weights, f"{self._prefix}.layers.{index}.mamba")

"""Mistral: Llama with sliding windows; Ministral and Ministral 3.

Ministral 3's queries grow with the logarithm of their position (``llama_4_scaling_beta`` among the
rope settings): by 1 + beta * log(1 + floor(position / original_max_position_embeddings)).
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.layers.attention import PositionScaledAttention
from sametoken.layers.residual import Block
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import DIVIDING, WINDOWED
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable

_BETA = "llama_4_scaling_beta"
#: Of Ministral 3 where a config has no rope settings, as transformers has it.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


class MistralForCausalLM(Decoder):
    """The shared decoder with sliding windows in all or some layers; Ministral too."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
    #: A window is that of all layers, or of those that Ministral's ``layer_types`` say.
    ignored: ClassVar[tuple[str, ...]] = (
        "attention_bias",
        "use_sliding_window",
        "max_window_layers",
    )

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Rope settings without the growth of queries, which is Ministral 3's alone."""
        ropes = {key: settings.nested(key) for key in ("rope_scaling", "rope_parameters")}
        return {
            key: {name: value for name, value in rope.items() if name != _BETA}
            for key, rope in ropes.items()
            if _BETA in rope
        }

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        rope = Settings(self.config.rope, weights.source.location)
        if not rope.get(_BETA):
            return attention
        return PositionScaledAttention(attention, self._query_factors(rope).to(weights.device))

    def _query_factors(self, rope: Settings) -> Tensor:
        """[max_positions] fp32."""
        positions = torch.arange(self._max_positions, dtype=torch.float32)
        passed = torch.floor(positions / rope.positions("original_max_position_embeddings"))
        return 1 + rope.number(_BETA) * torch.log(1 + passed)


class Ministral3ForCausalLM(MistralForCausalLM):
    """The same decoder, with other defaults."""

    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    }
    ignored = ("attention_bias", *DIVIDING)

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """YaRN, where a config has no rope settings."""
        given = settings.get("rope_scaling") or settings.get("rope_parameters")
        return {} if given else {"rope_parameters": _YARN}


#: By the ``model_type`` of a text config; without one, the config is itself the decoder's.
_TEXT_DECODERS: Mapping[str, type[MistralForCausalLM]] = {
    "mistral": MistralForCausalLM,
    "mistral3": MistralForCausalLM,
    "ministral": MistralForCausalLM,
    "ministral3": Ministral3ForCausalLM,
}


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """The text decoder of Mistral 3, which is Mistral's or Ministral 3's."""

    implied: ClassVar[Mapping[str, Any]] = {}
    ties_by_default = True

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """The defaults of the decoder that ``model_type`` names.

        Raises:
            UnsupportedError: it names another one.
        """
        kind = str(settings.get("model_type", "mistral"))
        if kind not in _TEXT_DECODERS:
            raise UnsupportedError(
                f"{settings.location}: a text decoder of type {short(kind)} is not supported",
                f"supported: {', '.join(_TEXT_DECODERS)}",
            )
        own = _TEXT_DECODERS[kind]
        absent = {key: own.implied[key] for key in own.implied.keys() - settings.values.keys()}
        # Only a whole config of Mistral's with layer types is read as Ministral's.
        types = settings.get("layer_types") if kind == "ministral" else None
        return absent | own.renamed(settings) | {"layer_types": types}

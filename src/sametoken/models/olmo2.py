"""OLMo 2 and 3: norms after attention and MLP, none in front, and norms of q and k over all heads.

OLMo 3 sees windows in three layers of four, and scales its rope in the others alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.residual import Block, DecoderLayer, NoNorm, NormedAfter
from sametoken.models.blocks import load_mlp, with_wide_norms
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import WINDOWED, full_every
from sametoken.models.load.settings import (
    MAX_LAYERS,
    Settings,
    require_rope_type,
    unsupported,
)
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import RotaryTable


class Olmo2ForCausalLM(Decoder):
    """The shared decoder with norms in other places."""

    implied: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> DecoderLayer:
        prefix = f"{self._prefix}.layers.{index}"
        attention = self._load_attention(weights, index, rotary)
        after_attention = self._load_norm(weights, f"{prefix}.post_attention_layernorm")
        mlp = load_mlp(self.config, weights, f"{prefix}.mlp")
        after_mlp = self._load_norm(weights, f"{prefix}.post_feedforward_layernorm")
        return DecoderLayer(
            NoNorm(),
            NormedAfter(attention, after_attention),
            NoNorm(),
            NormedAfter(mlp, after_mlp),
        )

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention = self._self_attention(weights, index, rotary)
        prefix = f"{self._prefix}.layers.{index}.self_attn"
        return with_wide_norms(attention, self.config, weights, prefix)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """The same decoder with windows, whose rope is not scaled."""

    layer_types = WINDOWED
    #: Layer types alone say which have windows.
    ignored = ("use_sliding_window",)
    local_theta = 500_000.0
    implied: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Where a config has them not: every fourth layer sees all, and one base is that of all.

        transformers 5 reads an old config's base for layers that see all, and forgets it for those
        with a window (500,000). OLMo's authors have one, in vLLM and in transformers 4.

        Raises:
            UnsupportedError: rope settings that name no layer type, as transformers 5.2 writes
                them: it scaled the rope of windows too, later ones pass over them. Or as
                ``require_rope_type``.
        """
        require_rope_type(settings)
        if not all(isinstance(one, dict) for one in settings.nested("rope_parameters").values()):
            raise unsupported(settings, "rope_parameters", "give them by layer type")
        num_layers = settings.integer("num_hidden_layers", most=MAX_LAYERS)
        return {
            "layer_types": list(settings.names("layer_types")) or full_every(4, num_layers),
            "rope_local_base_freq": settings.number("rope_theta"),
        }

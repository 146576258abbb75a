"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sametoken.errors import CheckpointError
from sametoken.layers.rotary import no_rotation
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import FULL, SLIDING, WINDOWED
from sametoken.models.load.settings import COMPARE, MAX_LAYERS, Settings
from sametoken.ops.backend import RotaryTable


class SmolLM3ForCausalLM(Decoder):
    """The shared decoder with heads that are not rotated where ``no_rope_layers`` has a 0."""

    layer_types = WINDOWED
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Which layers rotate, and that those which do not have the windows, if there are any.

        Raises:
            CheckpointError: ``no_rope_layers`` does not say it of every layer.
        """
        layers = range(settings.integer("num_hidden_layers", most=MAX_LAYERS))
        interval = settings.integer("no_rope_layer_interval")
        every = [int((index + 1) % interval != 0) for index in layers]
        rotates = settings.get("no_rope_layers", every)
        known = isinstance(rotates, list) and all(one in (0, 1) for one in rotates)
        if not known or len(rotates) < len(layers):
            raise CheckpointError(
                f"{settings.location}: no_rope_layers has no 0 or 1 for each of {len(layers)} "
                "layers",
                COMPARE,
            )
        types = list(settings.names("layer_types"))
        if not types and settings.switch("use_sliding_window"):
            types = [FULL if rotates[index] else SLIDING for index in layers]
        return {"no_rope_layers": rotates, "layer_types": types}

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        still = no_rotation(self._max_positions, device)
        rotates = self.config.extra["no_rope_layers"]
        rotaries = super()._rotaries(device)
        return tuple(one if rotates[index] else still for index, one in enumerate(rotaries))

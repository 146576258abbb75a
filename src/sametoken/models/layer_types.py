"""What a config says about its layers: their types and windows, and what cannot be run."""

from __future__ import annotations

import json
from reprlib import repr as short

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.load.settings import ANOTHER, COMPARE, Settings

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
#: The ``layer_types`` of a class with sliding windows.
WINDOWED = frozenset((FULL, SLIDING))
#: Keys that divide layers into those with a window and those without.
DIVIDING = ("use_sliding_window", "max_window_layers", "layer_types")
#: Settings that no class implements unless it says so.
REFUSED = ("mlp_bias",)


def full_every(count: int, num_layers: int) -> list[str]:
    """Layer types of which every ``count``-th sees all."""
    return [FULL if layer % count == 0 else SLIDING for layer in range(1, num_layers + 1)]


def sliding_windows(config: ModelConfig, location: str) -> list[int | None]:
    """The sliding window of each layer, in positions; None: full attention.

    Raises:
        CheckpointError: the window is impossible, or layer types and layers differ in number.
    """
    settings = Settings(config.extra, location)
    types = settings.names("layer_types")
    if not types and _uses_windows(settings):
        num_full = settings.count("max_window_layers")
        layers = range(config.num_layers)
        types = tuple(SLIDING if index >= num_full else FULL for index in layers)
    if SLIDING not in types:
        return [None] * config.num_layers
    if len(types) != config.num_layers:
        raise CheckpointError(
            f"{location}: {len(types)} layer_types for {config.num_layers} layers", COMPARE
        )
    window = settings.positions("sliding_window")
    return [window if layer_type == SLIDING else None for layer_type in types]


def _uses_windows(settings: Settings) -> bool:
    given = settings.get("sliding_window") is not None
    return given and settings.switch("use_sliding_window", default=True)


def require_supported(
    config: ModelConfig,
    supported: frozenset[str],
    location: str,
    *,
    activation: str = "silu",
    refused: tuple[str, ...] = REFUSED,
) -> None:
    """Refuse a config with operations that the decoder does not implement.

    It runs layers of the types ``supported`` and MLPs of one ``activation``; keys that are
    ``refused`` may not be set.

    Raises:
        UnsupportedError: it has one; named by its key.
    """
    settings = Settings(config.extra, location)
    windowed = _uses_windows(settings) and SLIDING not in supported
    if not _uses_windows(settings):
        supported -= {SLIDING}
    layer_types = set(settings.names("layer_types"))
    for unsupported, what in (
        (
            settings.get("hidden_act", activation) != activation,
            f"hidden_act={short(settings.get('hidden_act'))}",
        ),
        *((settings.get(key), f"{key}={_as_written(settings.get(key))}") for key in refused),
        # Of embedding models, whose rows see all others.
        (settings.get("is_causal") is False, "is_causal=false"),
        (windowed, f"sliding_window={short(settings.get('sliding_window'))}"),
        (layer_types - supported, f"layer_types={short(sorted(layer_types))}"),
    ):
        if unsupported:
            raise UnsupportedError(f"{location}: {what} is not supported", ANOTHER)


def _as_written(value: object) -> str:
    """A value as JSON has it; long ones shortened."""
    return json.dumps(value) if isinstance(value, bool) else short(value)

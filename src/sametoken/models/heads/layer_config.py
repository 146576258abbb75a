"""What a head's config says about its decoder layers: sizes, windows, rotation, formats."""

from __future__ import annotations

from dataclasses import replace
from reprlib import repr as short

from sametoken.errors import CheckpointError
from sametoken.models.base import ModelConfig
from sametoken.models.heads.base import refuse
from sametoken.models.heads.stored_names import NamedAsStored
from sametoken.models.layer_types import FULL, WINDOWED, sliding_windows
from sametoken.models.load.huggingface import model_config
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.settings import COMPARE, Settings


def read_layer_config(head: Settings) -> ModelConfig:
    """The decoder layer's sizes, nested in ``speculators`` configs, at the top in SafeAILab's.

    Raises:
        CheckpointError: a key is missing or impossible.
        UnsupportedError: the layer needs an operation that is not implemented.
    """
    config, location = head.values, head.location
    nested = config.get("transformer_layer_config", config)
    if not isinstance(nested, dict):
        raise CheckpointError(f"{location}: transformer_layer_config is not an object", COMPARE)
    named = Settings({"architectures": ["EagleHead"], **nested}, location)
    # Heads for Qwen3.5 rotate a part of each attention head, as their targets do.
    layer = model_config(_with_one_rope(named), rotates_parts=True)
    settings = Settings(layer.extra, location)
    activation = settings.get("hidden_act", "silu")
    latent = "deepseek" in str(config.get("architectures")).lower()
    other_types = sorted(set(settings.names("layer_types")) - WINDOWED)
    refuse(
        location,
        (activation != "silu", f"activation {short(activation)}"),
        (other_types, f"layer_types {short(other_types)}"),
        (latent, "DeepSeek's latent attention"),
    )
    return layer


def _with_one_rope(settings: Settings) -> Settings:
    """The config with the rope settings of its layers, where they are told by layer type.

    Layers of several types keep them all, which ``model_config`` refuses by name.
    """
    ropes, types = settings.get("rope_parameters"), set(settings.names("layer_types")) or {FULL}
    own = ropes.get(next(iter(types))) if isinstance(ropes, dict) and len(types) == 1 else None
    if not isinstance(own, dict):
        return settings
    return replace(settings, values={**settings.values, "rope_parameters": own})


def layer_windows(layer: ModelConfig, location: str) -> list[int | None]:
    """The sliding window of each layer, in positions; None: full attention.

    A ``sliding_window`` alone has no effect: heads are Llamas, to which it means nothing, and some
    have it from their target's config.

    Raises:
        CheckpointError: as ``sliding_windows``.
    """
    settings = Settings(layer.extra, location)
    if not settings.names("layer_types") and not settings.switch("use_sliding_window"):
        return [None] * layer.num_layers
    return sliding_windows(layer, location)


def read_head_quantization(head: Settings) -> Quantization:
    """The formats of a head's linears, from its config or its layer's; errors as there."""
    both = {**head.nested("transformer_layer_config"), **head.values}
    formats = read_quantization(both, head.location)
    return formats if formats is UNQUANTIZED else NamedAsStored(formats)

"""The LoRA adapters of an engine: refused or found before its weights are read, then read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.layers.slices import SLICE_ROWS
from sametoken.models.load.adapted import NO_ADAPTERS, Adapters, LoadedAdapters
from sametoken.models.load.adapter import read_adapter, read_adapter_config
from sametoken.models.names import resolve_adapter
from sametoken.types.speculative_methods import EXTRACT


def resolve_adapters(config: EngineConfig, announce: Callable[[str], None]) -> EngineConfig:
    """The config with the directories of adapters, whose own configs are read.

    Raises:
        ConfigError: another option excludes adapters.
        CheckpointError: an adapter is not there, or its config is malformed.
        UnsupportedError: an adapter's setting is not implemented.
    """
    if not config.lora_modules:
        return config
    _require_alone(config)
    found = []
    for one in config.lora_modules:
        path = resolve_adapter(one.path, announce)
        read_adapter_config(path)
        found.append(one._replace(path=str(path)))
    return replace(config, lora_modules=tuple(found))


def load_adapters(config: EngineConfig) -> Adapters:
    """Read the adapters of a config that is resolved; errors as ``read_adapter``."""
    if not config.lora_modules:
        return NO_ADAPTERS
    read = (read_adapter(one.name, Path(one.path)) for one in config.lora_modules)
    return LoadedAdapters(tuple(read))


def _require_alone(config: EngineConfig) -> None:
    speculative = config.speculative_config
    if speculative is not None and speculative.method == EXTRACT:
        raise ConfigError(
            "hidden states are extracted of the model alone", "leave lora_modules out"
        )
    if config.expand_prompts_from:
        raise ConfigError(
            "prompts in the expanded form have no adapters",
            "leave expand_prompts_from or lora_modules out",
        )
    if config.max_num_batched_tokens > SLICE_ROWS:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is more than the {SLICE_ROWS} "
            "rows of a step with adapters",
            "lower it: longer prompts run in several steps, with the same tokens",
        )

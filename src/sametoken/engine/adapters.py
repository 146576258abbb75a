"""The LoRA adapters of an engine: refused or found before its weights are read, then read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.slices import SLICE_ROWS
from sametoken.models.adapted import AdaptedModel
from sametoken.models.adapter_factors import Adapter
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.load.adapter import Stamps, changed, open_adapter, read_adapter_config
from sametoken.models.names import resolve_adapter
from sametoken.ops.model.low_rank import Room
from sametoken.types.speculative_methods import EXTRACT


def resolve_adapters(
    config: EngineConfig, architecture: ModelConfig, announce: Callable[[str], None]
) -> EngineConfig:
    """The config with the directories of adapters, whose own configs are read.

    Raises:
        ConfigError: another option excludes adapters.
        CheckpointError: an adapter is not there, or its config is malformed.
        UnsupportedError: an adapter's setting is not implemented, or no adapter fits the model.
    """
    if not (config.lora_modules or config.enable_lora):
        return config
    _require_alone(config)
    if architecture.holds_factors:
        raise UnsupportedError(
            f"{config.model} has the model's factors in its weights and does not tell them, so "
            "adapters would lack them",
            "use the original checkpoint",
        )
    found = []
    for one in config.lora_modules:
        path = resolve_adapter(one.path, announce)
        read_adapter_config(path)
        found.append(one._replace(path=str(path)))
    return replace(config, lora_modules=tuple(found))


def read_adapters(
    config: EngineConfig, of_rank_0: Callable[[list[Stamps]], list[Stamps]] = lambda own: own
) -> list[Adapter]:
    """Read the adapters of a config that is resolved.

    Args:
        config: resolved.
        of_rank_0: of several ranks, the stamps that rank 0 gave to its call.

    Raises:
        CheckpointError, UnsupportedError: as ``open_adapter`` and ``StoredAdapter.read``; or ranks
            read different files.
    """
    found = [open_adapter(Path(one.path)) for one in config.lora_modules]
    for one, stamps in zip(found, of_rank_0([one.stamps for one in found]), strict=True):
        if one.stamps != stamps:
            raise changed(one.location)
    return [one.read() for one in found]


def adapted(
    target: Decoder,
    adapters: Sequence[Adapter],
    config: EngineConfig,
    parallel: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> AdaptedModel | None:
    """The target with room for adapters, and those of the start in it; None without any.

    Args:
        target: as loaded.
        adapters: of the start, in the order of their numbers.
        config: resolved.
        parallel: the ranks that divide the target.
        dtype, device: of the factors.

    Raises:
        CheckpointError, UnsupportedError: as ``AdaptedModel.prepare``.
    """
    ranks, modules = [one.rank for one in adapters], None
    count, experts = len(adapters), any(one.has_experts for one in adapters)
    if config.enable_lora:
        count, ranks = max(count, config.max_loras), [*ranks, config.max_lora_rank]
        experts |= config.lora_experts
    elif adapters:
        modules = frozenset(name for one in adapters for name in one.changed)
    else:
        return None
    room = Room(count, max(ranks), dtype, device)
    model = AdaptedModel(target, parallel, room, modules, experts=experts and modules is None)
    for number, adapter in enumerate(adapters, start=1):
        model.prepare(adapter, number)(number)
    return model


def widest_of(target: Decoder, model: AdaptedModel | None) -> Decoder:
    """The target with all that stands beside its weights."""
    return target if model is None else model.decoder


def _require_alone(config: EngineConfig) -> None:
    speculative = config.speculative_config
    if speculative is not None and speculative.method == EXTRACT:
        raise ConfigError(
            "hidden states are extracted of the model alone",
            "leave lora_modules and enable_lora out",
        )
    if config.max_num_batched_tokens > SLICE_ROWS:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is more than the {SLICE_ROWS} "
            "rows of a step with adapters",
            "lower it: longer prompts run in several steps, with the same tokens",
        )

"""The engine's interface to extraction, and how a directory is opened for it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError, in_words
from sametoken.extraction.shards import (
    MANIFEST,
    Manifest,
    StateSource,
    read_manifest,
    write_manifest,
)
from sametoken.extraction.writer import StateWriter
from sametoken.io.cache_directory import expanded
from sametoken.io.files import DirectoryLock
from sametoken.models.base import ModelConfig
from sametoken.types.outputs import StepResult
from sametoken.types.plan import StepPlan
from sametoken.types.speculative_methods import EXTRACT

#: A shard is written once its rows take this much host memory, and when the engine is idle.
SHARD_BYTES = 256 * 2**20


class Extraction(Protocol):
    """Callbacks from the engine to the recorder of hidden states."""

    def wrap(self, drafter: Drafter) -> Drafter:
        """The drafter that the engine uses in place of ``drafter``."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """A step was enqueued."""
        ...

    def process_output(self, result: StepResult) -> None:
        """The oldest step's result was read; calls of ``end`` for its requests follow."""
        ...

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """A request was released; unknown ids are ignored."""
        ...

    def flush(self) -> None:
        """The engine is idle."""
        ...

    def close(self) -> None:
        """Stop recording and release the directory."""
        ...


class NoExtraction:
    """Records nothing."""

    def wrap(self, drafter: Drafter) -> Drafter:
        """The same drafter."""
        return drafter

    def launch(self, plan: StepPlan) -> None:
        """A no-op."""

    def process_output(self, result: StepResult) -> None:
        """A no-op."""

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """A no-op."""

    def flush(self) -> None:
        """A no-op."""

    def close(self) -> None:
        """A no-op."""


def open_extraction(
    spec: SpeculativeConfig | None,
    path: Path,
    model: ModelConfig,
    layers: tuple[int, ...],
    dtype: torch.dtype,
) -> Extraction:
    """Create and lock the directory, and return its recorder, if the method is extraction.

    States of earlier runs are kept; new ones are appended.

    Args:
        spec: the speculative config.
        path: the target's checkpoint.
        model: the target's architecture.
        layers: the recorded layers, as in ``Decoder``.
        dtype: dtype of the states.

    Raises:
        ConfigError: the directory cannot be made or written, holds something else, or another
            engine writes to it.
        CheckpointError: its manifest is damaged.
    """
    if spec is None or spec.method != EXTRACT:
        return NoExtraction()
    source = StateSource(
        model=str(path),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        eagle_aux_hidden_state_layer_ids=layers,
        dtype=str(dtype).removeprefix("torch."),
    )
    directory = expanded(spec.shared_storage_path or "")
    lock = _held(directory)
    try:
        manifest = _found_or_new(directory, source)
        write_manifest(directory, manifest)
    except BaseException:
        lock.close()
        raise
    return StateWriter(directory, lock, manifest, len(layers), SHARD_BYTES)


def _held(directory: Path) -> DirectoryLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"shared_storage_path {directory} cannot be created ({in_words(error)})",
            "set another one",
        ) from error
    return DirectoryLock(
        directory, "stop the engine that writes there, or set another shared_storage_path"
    )


def _found_or_new(directory: Path, source: StateSource) -> Manifest:
    if not (directory / MANIFEST).exists():
        return Manifest(source)
    found = read_manifest(directory)
    if not found.sequences:
        # As a failed start leaves it.
        return Manifest(source)
    for one in fields(StateSource):
        theirs, ours = getattr(found.source, one.name), getattr(source, one.name)
        if theirs != ours:
            raise ConfigError(
                f"{directory} holds states with {one.name}={theirs!r}, these have {ours!r}",
                "set another shared_storage_path, or empty this one",
            )
    return found

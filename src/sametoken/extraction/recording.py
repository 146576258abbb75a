"""Whether an engine's hidden states are recorded, and where they go."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch

from sametoken.config import EXTRACT, SpeculativeConfig
from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError
from sametoken.extraction.shards import (
    MANIFEST,
    Manifest,
    StateSource,
    read_manifest,
    write_manifest,
)
from sametoken.extraction.writer import StateWriter
from sametoken.io.files import DirectoryLock
from sametoken.models.base import ModelConfig
from sametoken.types.outputs import StepResult
from sametoken.types.plan import StepPlan

#: Rows are written once they take as much host memory, and when the engine has nothing to do.
SHARD_BYTES = 256 * 2**20


class Extraction(Protocol):
    """What the engine tells whoever records its states."""

    def wrap(self, drafter: Drafter) -> Drafter:
        """The drafter that the engine is to use in place of ``drafter``."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """A step was enqueued."""
        ...

    def process_output(self, result: StepResult) -> None:
        """The oldest step's verdict was read; its requests' ends, if it brings any, come next."""
        ...

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """A request was released; unknown ids are ignored."""
        ...

    def flush(self) -> None:
        """No request is under way."""
        ...

    def close(self) -> None:
        """Nothing is recorded any more, whoever may still refer to this."""
        ...


class NoExtraction:
    """Records nothing."""

    def wrap(self, drafter: Drafter) -> Drafter:
        """The same drafter."""
        return drafter

    def launch(self, plan: StepPlan) -> None:
        """Nothing to note."""

    def process_output(self, result: StepResult) -> None:
        """Nothing to note."""

    def end(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """Nothing to note."""

    def flush(self) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to let go."""


def open_extraction(
    spec: SpeculativeConfig | None,
    path: Path,
    model: ModelConfig,
    layers: tuple[int, ...],
    dtype: torch.dtype,
) -> Extraction:
    """What records states, as the method asks; its directory is made, held, and can be written.

    States of earlier runs stay, and those of this one come after them.

    Args:
        spec: what was asked.
        path: the target's checkpoint.
        model: its architecture.
        layers: as in ``Decoder``.
        dtype: of the states.

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
    directory = Path(spec.shared_storage_path or "")
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
            f"shared_storage_path {directory} cannot be made a directory ({error})",
            "set another one",
        ) from error
    return DirectoryLock(
        directory, "end the engine that writes there, or set another shared_storage_path"
    )


def _found_or_new(directory: Path, source: StateSource) -> Manifest:
    if not (directory / MANIFEST).exists():
        return Manifest(source)
    found = read_manifest(directory)
    for one in fields(StateSource):
        theirs, ours = getattr(found.source, one.name), getattr(source, one.name)
        if theirs != ours:
            raise ConfigError(
                f"{directory} holds states with {one.name}={theirs!r}, these have {ours!r}",
                "set another shared_storage_path, or empty this one",
            )
    return found

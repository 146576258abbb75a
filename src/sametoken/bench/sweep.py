"""Run a sweep: one process per engine, one file per cell; finished cells are skipped."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.bench.documents import read_json, write_json
from sametoken.bench.names import EngineNames
from sametoken.bench.sweep_spec import Cell, Sweep
from sametoken.errors import ConfigError
from sametoken.io.child_process import module_command, module_environment, status_text
from sametoken.io.files import DirectoryLock, make_directory

DONE, FAILED = "done", "failed"
BEGUN = "begun"
_CHILD = "sametoken.bench.sweep_engine"
_SHOWN_ERROR = 600


@dataclass(frozen=True, slots=True)
class CellStore:
    """A directory with one JSON file per measured cell: a document with the key ``cell``."""

    directory: Path

    def path(self, cell: Cell) -> Path:
        """Return the path of the cell's file."""
        return self.directory / f"{cell.name}.json"

    def status(self, cell: Cell) -> str | None:
        """Return ``DONE``, ``FAILED``, or None if the cell was not measured.

        Raises:
            ConfigError: its file cannot be read or belongs to another cell.
        """
        path = self.path(cell)
        if not path.exists():
            return None
        found = read_json(path)
        if found.get("cell") != json.loads(json.dumps(dataclasses.asdict(cell))):
            raise ConfigError(f"{path} belongs to another cell", "give another directory")
        return DONE if found.get("status") == DONE else FAILED

    def error(self, cell: Cell) -> str:
        """Return why a cell failed.

        Raises:
            ConfigError: as ``status``.
        """
        return str(read_json(self.path(cell)).get("error", ""))

    def finish(self, cell: Cell, document: dict[str, Any]) -> None:
        """Write a cell's result."""
        write_json(self.path(cell), self._about(cell, DONE) | document)

    def fail(self, cell: Cell, error: str) -> None:
        """Write why a cell has no result."""
        write_json(self.path(cell), self._about(cell, FAILED) | {"error": error})

    def forget(self, cell: Cell) -> None:
        """Remove a cell's file, so that the cell is measured again."""
        self.path(cell).unlink(missing_ok=True)

    def _about(self, cell: Cell, status: str) -> dict[str, Any]:
        return {"cell": dataclasses.asdict(cell), "status": status}


def run_sweep(
    sweep: Sweep,
    directory: Path,
    *,
    retry_failed: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Measure the cells that have no result yet.

    Args:
        sweep: the cells.
        directory: results directory; created if missing.
        retry_failed: also measure failed cells again.
        announce: called with one line per engine and per failed cell.

    Returns:
        The number of ``DONE`` and of ``FAILED`` cells, earlier runs included.

    Raises:
        ConfigError: the directory cannot be made, another sweep measures there, or a result cannot
            be read or written.
    """
    make_directory(directory)
    store = CellStore(directory)
    engines = list(sweep.engines())
    names = EngineNames.of([cells[0].engine_options() for cells in engines])
    with DirectoryLock(directory, "wait for that sweep's end"):
        for cells in engines:
            if retry_failed:
                for cell in _with_status(store, cells, FAILED):
                    store.forget(cell)
            pending = _with_status(store, cells, None)
            count = f"{len(pending)} of {len(cells)} cells to measure"
            announce(f"{_engine_name(cells[0], names)}: {count}")
            _run_engine(store, pending)
            for cell in _with_status(store, cells, FAILED):
                announce(f"failed: {cell.name}: {store.error(cell)}")
    every = [store.status(cell) for cells in engines for cell in cells]
    return {status: every.count(status) for status in (DONE, FAILED)}


def _run_engine(store: CellStore, pending: list[Cell]) -> None:
    """Start the engine until each cell has a result or an error."""
    while pending:
        begun, error = launch_engine(store.directory, pending)
        left = _with_status(store, pending, None)
        # If the process dies, the cell that it had begun fails; without one, all cells fail.
        lost = [cell for cell in left if cell.name == begun]
        if begun is None and len(left) == len(pending):
            lost = left
        for cell in lost:
            store.fail(cell, error or "the process ended without a result")
        pending = _with_status(store, pending, None)


def launch_engine(directory: Path, cells: Sequence[Cell]) -> tuple[str | None, str]:
    """Measure the cells of one engine in a new Python process.

    Returns:
        The name of the last cell that it began, and an error or "".
    """
    job = {"directory": str(directory), "cells": [dataclasses.asdict(cell) for cell in cells]}
    with subprocess.Popen(
        module_command(_CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=module_environment(),
        encoding="utf-8",
        errors="replace",
    ) as child:
        try:
            # One that ends before it has read this says why by its status.
            output, errors = child.communicate(json.dumps(job))
        except BaseException:
            child.terminate()
            raise
    begun = None
    for line in output.splitlines():
        word, _, name = line.partition(" ")
        begun = name if word == BEGUN else begun
    if not child.returncode:
        return begun, ""
    how = status_text(child.returncode)
    return begun, f"the engine's process ended with {how}: {errors.strip()[-_SHOWN_ERROR:]}"


def _with_status(store: CellStore, cells: Iterable[Cell], status: str | None) -> list[Cell]:
    return [cell for cell in cells if store.status(cell) == status]


def _engine_name(cell: Cell, names: EngineNames) -> str:
    spec = cell.speculative_config
    drafts = f"{names.drafter(spec)}, k={spec.get('num_speculative_tokens')}" if spec else "plain"
    return f"{cell.model}, {drafts}, TP {cell.tensor_parallel_size}"

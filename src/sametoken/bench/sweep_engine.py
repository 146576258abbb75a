"""``python -m sametoken.bench.sweep_engine``: measure the cells of one engine.

Stdin is a JSON object with ``directory`` and ``cells``. Stdout has one line per cell, when it
begins, and nothing else; results and errors are files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sametoken.bench.documents import offline_document
from sametoken.bench.session import Session
from sametoken.bench.sweep import BEGUN, CellStore
from sametoken.bench.sweep_spec import Cell
from sametoken.bench.workload import Workload
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, SametokenError

#: Fits every engine; the workload of each cell is checked before it runs.
_LEAST = Workload(input_len=1, output_len=1)


def measure_cells(store: CellStore, cells: Sequence[Cell]) -> None:
    """Measure cells that share an engine.

    Raises:
        SametokenError: as ``Session.open``; or a cell failed while running, which may have
            stopped the engine. The error is in the cell's file.
    """
    config = EngineConfig.from_options(**cells[0].engine_options())
    path = cells[0].path
    dataset = (cells[0].dataset, Path(path) if path else None)
    session = Session.open(config, _LEAST, dataset=dataset, announce=_log)
    for cell in cells:
        sys.stdout.write(f"{BEGUN} {cell.name}\n")
        sys.stdout.flush()
        try:
            cell_session = session.with_workload(cell.workload)
        except ConfigError as error:
            store.fail(cell, str(error))
            continue
        try:
            sizes = [cell.concurrency] * cell.num_iters
            summary = cell_session.run(cell.concurrency, sizes, warmup=cell.warmup, num_traced=1)
        except Exception as error:
            store.fail(cell, f"{type(error).__name__}: {error}")
            raise
        title = f"latency, {cell.num_iters} batches"
        more = {"warmup": cell.warmup, "dataset": cell.dataset}
        document = offline_document(title, cell_session, [summary], more)
        store.finish(cell, document)


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """Measure the cells given on stdin; return the error's exit code or 0."""
    job = json.load(sys.stdin)
    cells = [Cell(**cell) for cell in job["cells"]]
    try:
        measure_cells(CellStore(Path(job["directory"])), cells)
    except SametokenError as error:
        _log(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

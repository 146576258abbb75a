"""``python -m sametoken.bench.sweep_engine``: measure cells of one engine, as stdin names them.

Stdin holds an object with ``directory`` and ``cells``. A line on stdout names every cell that is
begun. Nothing else is said there: results and errors are files.
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

#: Fits every engine: what the cells ask is checked one by one.
_LEAST = Workload(input_len=1, output_len=1)


def measure_cells(store: CellStore, cells: Sequence[Cell]) -> None:
    """Measure cells that share an engine.

    Raises:
        SametokenError: as ``Session.open``; or one cell failed in a way that the engine may
            not have survived, and the cell's file says so.
    """
    config = EngineConfig.from_options(**cells[0].engine_options())
    path = cells[0].path
    dataset = (cells[0].dataset, Path(path) if path else None)
    session = Session.open(config, _LEAST, dataset=dataset, announce=_tell)
    for cell in cells:
        sys.stdout.write(f"{BEGUN} {cell.name}\n")
        sys.stdout.flush()
        try:
            asked = session.with_workload(cell.workload)
        except ConfigError as error:
            store.fail(cell, str(error))
            continue
        try:
            sizes = [cell.concurrency] * cell.num_iters
            summary = asked.run(cell.concurrency, sizes, warmup=cell.warmup, num_traced=1)
        except Exception as error:
            store.fail(cell, f"{type(error).__name__}: {error}")
            raise
        title = f"latency, {cell.num_iters} batches"
        more = {"warmup": cell.warmup, "dataset": cell.dataset}
        document = offline_document(title, asked, [summary], more)
        store.finish(cell, document)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """Measure what stdin asks for; the exit code is that of the error."""
    job = json.load(sys.stdin)
    cells = [Cell(**cell) for cell in job["cells"]]
    try:
        measure_cells(CellStore(Path(job["directory"])), cells)
    except SametokenError as error:
        _tell(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

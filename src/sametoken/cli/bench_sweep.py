"""``sametoken bench sweep``: measure many engines and workloads; resumable."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.bench.names import EngineNames
from sametoken.bench.sweep_spec import PRESETS, Sweep, changed_engine_options, make_sweep
from sametoken.cli.options import AsJson, engine_options, numbers, options_of, take, with_options
from sametoken.cli.report import status_console, wide_console
from sametoken.config import option

if TYPE_CHECKING:
    from rich.table import Table

SOME_FAILED = 1
#: Options of the engine that are axes of a sweep.
_ARE_AXES = ("speculative_config", "tensor_parallel_size")
#: Axes that are lists of numbers.
_LISTS = {
    "num_speculative_tokens": int,
    "tensor_parallel_size": int,
    "input_len": int,
    "output_len": int,
    "concurrency": int,
    "temperature": float,
}


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes as command-line options: lists as in 1,8,64."""

    model: tuple[str, ...] = option((), "checkpoint; may be repeated")
    drafter: tuple[str, ...] = option(
        (),
        "speculative config as JSON or a method's name, or none; may be repeated [default: none]",
    )
    num_speculative_tokens: str | None = option(
        None, "drafts per step, for drafters without a number [default: 3]"
    )
    tensor_parallel_size: str | None = option(None, "GPUs that share the model [default: 1]")
    input_len: str | None = option(None, "number of random prompt tokens [default: 512]")
    output_len: str | None = option(None, "tokens per answer [default: 128]")
    concurrency: str | None = option(None, "requests that run at once [default: 1]")
    temperature: str | None = option(None, "sampling temperature; 0 is greedy [default: 0]")
    num_iters: int | None = option(None, "number of measured batches per cell [default: 3]")
    warmup: int | None = option(None, "number of short batches before each cell [default: 1]")
    seed: int | None = option(None, "seed of random prompts and of sampling [default: 0]")
    dataset: str | None = option(
        None, "gsm8k, humaneval, mt-bench, spec-bench or custom [default: random]"
    )
    path: str | None = option(None, "file of the dataset spec-bench or custom")


_AXES = options_of(_Axes)
_ENGINE = [
    parameter
    for parameter in engine_options(enable_prefix_caching=False)
    if parameter.name not in _ARE_AXES
]


@with_options(_AXES, _ENGINE)
def sweep(
    directory: Annotated[Path, typer.Argument(help="directory for results, one file per cell")],
    *,
    preset: Annotated[
        str | None, typer.Option(help=f"named set of axes: {', '.join(PRESETS)}")
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="JSON file with axes; options override it")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="measure failed cells again")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list the cells and measure nothing")
    ] = False,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Measure every combination of models, drafters and workloads, one process per engine.

    Cells with a result are skipped, so the same command continues an interrupted sweep. The
    exit code is 1 if a cell failed. See also: bench report DIRECTORY --html FILE.
    """
    from sametoken.bench.documents import read_json
    from sametoken.bench.sweep import run_sweep

    axes = take(options, _AXES)
    file = None if spec is None else read_json(spec, 'give axes, as in {"concurrency": [1, 8]}')
    cells = make_sweep(preset, file, _given(axes, options))
    if not dry_run:
        show = status_console().print
        run_sweep(cells, directory, retry_failed=retry_failed, announce=show)
    rows = _rows(cells, directory)
    if json_output:
        typer.echo(json.dumps(rows))
    else:
        wide_console().print(_table(rows))
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(SOME_FAILED)


def _given(axes: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the given options to the axes of ``make_sweep``.

    Raises:
        ConfigError: a list cannot be read.
    """
    given = {name: value for name, value in axes.items() if value not in (None, [])}
    for name in given.keys() & _LISTS.keys():
        given[name] = numbers(name, given[name], _LISTS[name])
    return {**given, "engine": changed_engine_options(options)}


def _rows(planned: Sweep, directory: Path) -> list[dict[str, Any]]:
    """List every cell with its status and main numbers."""
    from sametoken.bench.documents import read_json
    from sametoken.bench.sweep import CellStore

    store = CellStore(directory)
    rows = []
    for cell in (cell for cells in planned.engines() for cell in cells):
        status = store.status(cell)
        found = read_json(store.path(cell)) if status else {}
        result = (found.get("results") or [{}])[0]
        rows.append(
            {
                "cell": dataclasses.asdict(cell),
                "name": cell.name,
                "status": status or "to measure",
                "error": found.get("error"),
                "tokens_per_second": result.get("tokens_per_second"),
                "tpot_median": result.get("tpot_median"),
                "acceptance_length": result.get("acceptance_length"),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    names = EngineNames.of([row["cell"] for row in rows])
    table = Table()
    for heading in ("model", "drafts", "TP", "in", "out", "at once", "T", "status"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "TPOT ms", "length"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cell, spec = row["cell"], row["cell"]["speculative_config"]
        k = spec.get("num_speculative_tokens", "") if spec else ""
        drafts = f"{names.drafter(spec)} {k}" if spec else "plain"
        shown = ("tensor_parallel_size", "input_len", "output_len", "concurrency", "temperature")
        numbers = (row[name] for name in ("tokens_per_second", "tpot_median", "acceptance_length"))
        table.add_row(
            names.models[cell["model"]],
            drafts,
            *(f"{cell[name]:g}" for name in shown),
            row["status"],
            *("-" if number is None else f"{number:.1f}" for number in numbers),
        )
    return table

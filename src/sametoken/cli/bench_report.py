"""``sametoken bench report``: runs side by side, as an HTML page or as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.cli.options import AsJson
from sametoken.cli.report import wide_console
from sametoken.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

#: The table's metrics and their headings.
_SHOWN = {
    "tokens_per_second": "tokens/s",
    "ttft_median": "TTFT ms",
    "tpot_mean": "TPOT ms",
    "acceptance_length": "length",
}
# Of engines and workloads, shown where cells differ in them.
_SOMETIMES = {
    "model": "model",
    "tensor_parallel_size": "TP",
    "dtype": "dtype",
    "request_rate": "requests/s",
    "temperature": "T",
    "benchmark": "benchmark",
}


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="JSON files of bench, or directories of bench sweep")
    ],
    html: Annotated[
        Path | None, typer.Option(help="write a self-contained HTML page to this file")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="name of a run; repeat it in the order of the runs")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Compare runs with the first one."""
    from sametoken.bench.comparison import compare_runs
    from sametoken.bench.documents import render_report, require_output
    from sametoken.io.files import write_text

    require_output(html)
    data = compare_runs(runs, label or ())
    if html is not None:
        title = " against ".join(run["label"] for run in reversed(data["runs"]))
        try:
            page = render_report(f"{title}: benchmark", data)
        except ImportError as error:
            raise ConfigError(f"plotly is missing ({error})", "run pip install plotly") from error
        write_text(html, page)
    if json_output:
        typer.echo(json.dumps(data))
        return
    wide_console().print(_table(data))
    for failure in data["failures"]:
        typer.echo(f"failed: {failure['run']}: {failure['cell']}: {failure['error']}")


def _table(data: Mapping[str, Any]) -> Table:
    from rich.table import Table

    more = _telling(data["cells"])
    table = Table()
    for heading in ("run", "drafts", "prompts", "in", "out", "at once", *more.values()):
        table.add_column(heading, no_wrap=True)
    for heading in _SHOWN.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in data["cells"]:
        engine, workload = cell["engine"], cell["workload"]
        drafts = f"{engine['drafter']} {engine['num_speculative_tokens'] or ''}".strip()
        names = ("dataset", "input_len", "output_len", "concurrency", *more)
        values = engine | workload
        described = ("-" if values[name] is None else str(values[name]) for name in names)
        numbers = (cell["numbers"].get(name) for name in _SHOWN)
        shown = ("-" if number is None else f"{number:.2f}" for number in numbers)
        table.add_row(cell["run"], drafts, *described, *shown)
    return table


def _telling(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Further keys of cells in which some differ, with their headings."""

    def differs(name: str) -> bool:
        return len({str((cell["engine"] | cell["workload"])[name]) for cell in cells}) > 1

    return {name: heading for name, heading in _SOMETIMES.items() if differs(name)}

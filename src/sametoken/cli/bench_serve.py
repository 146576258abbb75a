"""``sametoken bench serve``: put load on a running OpenAI-compatible server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.bench.workload import Server, ServingWorkload
from sametoken.cli.options import AsJson, numbers, options_of, take, with_options
from sametoken.cli.report import per_position, report_results, status_console, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from sametoken.bench.openai_stream import Load
    from sametoken.bench.serving_numbers import Goal

SOME_FAILED = 1
_LATENCIES = {
    "ttft": "first token",
    "tpot": "per later token",
    "itl": "between events",
    "e2e": "whole answer",
}


@with_options(options_of(Server), options_of(ServingWorkload))
def serve(
    goals: Annotated[
        list[str] | None, typer.Argument(help="further goals of --goodput", metavar="GOAL")
    ] = None,
    *,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Poisson requests per second; a list as in 1,2,4 gives one result each"),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            help="maximum number of running requests; a list as in 1,8,64 gives one result each",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="latency bounds of a good request in ms: ttft:200 tpot:50 e2e:9000"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="also write the JSON object to this file")
    ] = None,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Put load on a running server and measure latency and throughput at its clients.

    Without a rate and a concurrency, all requests are sent at once. Failed requests are
    counted and listed; the exit code is then 1.
    """
    from sametoken.bench.documents import require_output
    from sametoken.bench.serving_numbers import parse_goals

    server, workload = Server(**take(options, Server)), ServingWorkload(**options)
    require_output(output)
    loads = _loads(concurrency, request_rate, workload.seed)
    bounds = parse_goals([*(goodput or ()), *(goals or ())])
    document: dict[str, Any] = {}
    try:
        _measure(server, workload, loads, bounds, document.update)
    finally:
        # Finished loads outlive an interrupt.
        if document:
            report_results(document, output, json_output, lambda: _show(document))
    if any(result["num_failed"] for result in document["results"]):
        raise typer.Exit(SOME_FAILED)


def _measure(
    server: Server,
    workload: ServingWorkload,
    loads: Sequence[Load],
    goals: Sequence[Goal],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    import asyncio

    from rich.progress import Progress

    from sametoken.bench.serving import bench_serving

    status = status_console()
    with Progress(console=status) as progress:
        total = len(loads) * workload.repeats * workload.num_prompts
        task = progress.add_task("requests", total=total)
        asyncio.run(
            bench_serving(
                server,
                workload,
                loads,
                goals,
                announce=status.print,
                advance=lambda: progress.advance(task),
                keep=keep,
            )
        )


def _loads(concurrency: str | None, request_rate: str | None, seed: int) -> list[Load]:
    """Build a load for every pair of a concurrency and a rate.

    Raises:
        ConfigError: an option is not a list of numbers, or a number is impossible.
    """
    from sametoken.bench.openai_stream import Load

    at_once = _numbers("concurrency", concurrency, int)
    rates = _numbers("request_rate", request_rate, float)
    return [Load(c, rate, seed) for c, rate in itertools.product(at_once, rates)]


def _numbers(name: str, text: str | None, kind: type[Any]) -> list[Any]:
    """Parse a list of numbers; ``[None]`` for None and "inf"."""
    return [None] if text is None or text == "inf" else numbers(name, text, kind)


def _show(document: Mapping[str, Any]) -> None:
    console = wide_console()
    workload, requested = document["workload"], document["settings"]["asked"]
    console.print(
        f"{document['benchmark']} of {workload['dataset']} by {workload['api']}, "
        f"{workload['output_len']} out at most, temperature {workload['temperature']:g}, "
        f"{requested['model']} at {document['settings']['server']['url']}",
    )
    if document["synthetic"]:
        synthetic = ", ".join(document["synthetic"]).upper()
        console.print(f"{synthetic}: only times mean anything")
    console.print(_table(document["results"], workload["goals"]))
    for load in document["missing_loads"]:
        console.print(f"not measured: {_load_name(load)}")
    for result in document["results"]:
        for error, count in result["errors"].items():
            console.print(f"{count} failed: {error}")
        if not result["tokens_counted_by_server"]:
            console.print("the server counts no tokens: events are counted instead")


def _table(results: Sequence[Mapping[str, Any]], goals: Mapping[str, float]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("load")
    for result in results:
        table.add_column(_load_name(result), justify="right")
    rows = {
        "requests answered": "num_requests",
        "requests failed": "num_failed",
        "requests/s": "requests_per_second",
        "tokens/s": "tokens_per_second",
    }
    rows |= {
        f"{text}, {name.upper()} {kind} ms": f"{name}_{kind}"
        for name, text in _LATENCIES.items()
        for kind in ("mean", "median", "p90", "p99")
    }
    if goals:
        kept = ", ".join(f"{name} {limit:g}" for name, limit in goals.items())
        rows[f"goodput, requests/s ({kept} ms)"] = "goodput"
    rows["acceptance length"] = "acceptance_length"
    for text, name in rows.items():
        table.add_row(text, *(_cell(result[name]) for result in results))
    rates = (per_position(result["acceptance_per_position"]) for result in results)
    table.add_row("acceptance per position", *rates)
    return table


def _load_name(result: Mapping[str, Any]) -> str:
    concurrency, rate = result["concurrency"], result["request_rate"]
    parts = [f"{concurrency} at once"] if concurrency is not None else []
    parts += [f"{rate:g}/s"] if rate is not None else []
    return ", ".join(parts) or "all at once"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"

"""``sametoken bench``: the engine's speed, beside the roofline of the memory bandwidth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.bench.workload import PRESETS, Workload
from sametoken.cli.bench_report import report
from sametoken.cli.bench_serve import serve
from sametoken.cli.bench_sweep import sweep
from sametoken.cli.options import AsJson, engine_options, numbers, options_in, take, with_options
from sametoken.cli.report import (
    memory_report,
    per_position,
    report_results,
    status_console,
    wide_console,
)
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError
from sametoken.types.option_values import listed
from sametoken.types.speculative_methods import LOOKUPS

if TYPE_CHECKING:
    from rich.table import Table

    from sametoken.bench.report import Summary
    from sametoken.bench.session import Session

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]

bench = typer.Typer(
    help="Measure the engine or a running server.", no_args_is_help=True, rich_markup_mode=None
)
bench.command()(serve)
bench.command()(sweep)
bench.command()(report)


def _workload_options(
    *,
    input_len: Annotated[
        int | None, typer.Option(help="number of random prompt tokens [default: 512]")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="tokens per answer, end-of-text ignored [default: 128]")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="requests that run at once, as in 1,8,64 [default: 1]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="sampling temperature; 0 is greedy [default: 0]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of random prompts and of sampling [default: 0]")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"named set of defaults: {', '.join(PRESETS)}")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="file of prompts, one JSON string or list of token ids per line"),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="number of short batches before each measurement")
    ] = 1,
) -> None:
    """The options of the workload, shared by both commands."""


def _record_options(
    *,
    trace: Annotated[
        int, typer.Option(min=0, help="number of requests whose tokens and windows are recorded")
    ] = 1,
    output: Annotated[
        Path | None, typer.Option(help="also write the JSON object to this file")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="gsm8k, humaneval, mt-bench, spec-bench or custom [default: random]"),
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="file of the dataset spec-bench or custom")
    ] = None,
) -> None:
    """The options of the dataset and of the recorded output."""


_WORKLOAD = options_in(_workload_options)
_RECORD = options_in(_record_options)
# With the prefix cache, a repeated prompt would skip its prefill.
_ENGINE = engine_options(enable_prefix_caching=False)


@bench.command()
@with_options(_WORKLOAD, _RECORD, _ENGINE)
def latency(
    model: Model = DEFAULT_MODEL,
    num_iters: Annotated[int, typer.Option(min=1, help="number of measured batches")] = 3,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Run a batch of requests that start together, several times."""
    _bench(f"latency, {num_iters} batches", model, options, json_output, lambda c: [c] * num_iters)


@bench.command()
@with_options(_WORKLOAD, _RECORD, _ENGINE)
def throughput(
    model: Model = DEFAULT_MODEL,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="number of measured requests per run")
    ] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="number of runs, which shows the spread")] = 1,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Run a stream of requests: when one finishes, the next one starts."""
    title = f"throughput, {num_prompts} requests"
    _bench(title, model, options, json_output, lambda c: [num_prompts] * repeats)


@bench.command()
@with_options(engine_options())
def memory(model: Model = DEFAULT_MODEL, json_output: AsJson = False, **options: Any) -> None:
    """Count the memory of weights and requests from config.json; no weights are loaded."""
    from sametoken.bench.memory import measure_memory

    config = EngineConfig.from_options(model=model, **options)
    found = measure_memory(config, status_console().print)
    typer.echo(json.dumps(found.as_json()) if json_output else memory_report(found))


def _bench(
    title: str,
    model: str,
    options: dict[str, Any],
    json_output: bool,
    sizes: Callable[[int], Sequence[int]],
) -> None:
    from rich.progress import Progress

    from sametoken.bench.documents import offline_document, require_output
    from sametoken.bench.session import Session

    given, record = take(options, _WORKLOAD), take(options, _RECORD)
    workload = _workload(given, options)
    require_output(record["output"])
    prompts = Path(given["prompts"]) if given["prompts"] else None
    status = status_console()
    config = EngineConfig.from_options(model=model, **options)
    session = Session.open(
        config, workload, prompts=prompts, dataset=_dataset(given, record), announce=status.print
    )
    total = sum(sum(sizes(concurrency)) for concurrency in workload.concurrency)
    with Progress(console=status) as progress:
        task = progress.add_task("requests", total=total)
        summaries = [
            session.run(
                concurrency,
                sizes(concurrency),
                warmup=given["warmup"],
                num_traced=record["trace"],
                advance=lambda: progress.advance(task),
            )
            for concurrency in workload.concurrency
        ]
    more = {name: given[name] for name in ("preset", "warmup")} | {"dataset": record["dataset"]}
    document = offline_document(title, session, summaries, more)
    report_results(
        document, record["output"], json_output, lambda: _show(title, session, summaries)
    )


def _show(title: str, session: Session, summaries: Sequence[Summary]) -> None:
    console = wide_console()
    for line in _heading(title, session):
        console.print(line)
    console.print(_table(summaries))
    for line in _findings(session, summaries):
        console.print(line)


def _findings(session: Session, summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield one line per concurrency: acceptance, and the causes if it is low."""
    from sametoken.bench.acceptance import one_line

    speculative = session.resolved.config.speculative_config
    if speculative is None or not speculative.proposes or speculative.synthetic_rates:
        return
    for summary in summaries:
        line = one_line(summary.speculation, trained=speculative.method not in LOOKUPS)
        yield f"acceptance at {summary.concurrency} at once: {line}"


def _dataset(given: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[str, Path | None] | None:
    """Return the requested dataset and its file; None for other prompts.

    Raises:
        ConfigError: prompts are given in two ways.
    """
    if record["dataset"] is None and record["path"] is None:
        return None
    if given["prompts"]:
        raise ConfigError("prompts come from a file and from a dataset", "give one of them")
    return record["dataset"] or "custom", record["path"]


def _workload(given: Mapping[str, Any], options: Mapping[str, Any]) -> Workload:
    """Build the workload from the given options, over the preset's or the usual defaults.

    Raises:
        ConfigError: an option is unknown, impossible, or contradicts the preset.
    """
    preset = given["preset"]
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is not known", f"use {listed(PRESETS)}")
    if preset is not None and options["enable_prefix_caching"]:
        raise ConfigError(f"preset {preset!r} has no prefix cache", "leave prefix caching out")
    values = {
        name: given[name]
        for name in ("input_len", "output_len", "concurrency", "temperature", "seed")
        if given[name] is not None
    }
    if "concurrency" in values:
        values["concurrency"] = tuple(numbers("concurrency", values["concurrency"]))
    return dataclasses.replace(PRESETS[preset] if preset else Workload(), **values)


def _heading(title: str, session: Session) -> list[str]:
    resolved, workload = session.resolved, session.workload
    prompts = f"{len(workload.prompts)} prompts" if workload.prompts else f"{workload.input_len} in"
    speculative = resolved.config.speculative_config
    drafts = "no speculation"
    if speculative is not None:
        drafts = f"{speculative.label}, {speculative.num_speculative_tokens} drafts"
    lines = [
        f"{title}: {prompts}, {workload.output_len} out, temperature {workload.temperature:g}",
        f"{resolved.model_path}, {str(resolved.dtype).removeprefix('torch.')} on {resolved.device} "
        f"by {resolved.kernels}, {drafts}",
        f"memory bandwidth {session.bandwidth.bytes_per_second / 1e9:.1f} GB/s "
        f"({session.bandwidth.method})",
    ]
    if resolved.config.synthetic:
        synthetic = ", ".join(resolved.config.synthetic).upper()
        lines.append(f"{synthetic}: only times mean anything")
    return lines


def _table(summaries: Sequence[Summary]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("requests at once")
    for summary in summaries:
        table.add_column(str(summary.concurrency), justify="right")
    rows: dict[str, Callable[[Summary], str]] = {
        "tokens/s": lambda s: _number(s.tokens_per_second, 1),
        "tokens/s, best run": lambda s: _number(s.best_tokens_per_second, 1),
        "tokens/s, decode steps alone": lambda s: _number(s.decode_tokens_per_second, 1),
        "first token, median ms": lambda s: _number(s.ttft_median, 1),
        "first token, p99 ms": lambda s: _number(s.ttft_p99, 1),
        "per later token, mean ms": lambda s: _number(s.tpot_mean, 3),
        "decode step, median ms": lambda s: _number(s.step_median, 3),
        "decode step, p99 ms": lambda s: _number(s.step_p99, 3),
        "least possible, ms": lambda s: _number(s.floor, 3),
        "reached": lambda s: _percent(s.floor_fraction),
        "tokens per request and step": lambda s: _number(s.tokens_per_step, 2),
        "acceptance length": lambda s: _number(s.acceptance_length, 2),
        "acceptance per position": lambda s: per_position(s.acceptance_per_position),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(summary) for summary in summaries))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"

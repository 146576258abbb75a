"""The tables of ``drive.py``: both engines side by side, and beside the machine's floors.

    python benchmarks/under_load/report.py FILE_OR_FOLDER...

Reads one JSON file per engine and configuration, and that of --machine, and prints Markdown with
medians over repeats. A ratio above 1 is in our favour. ``floor.py`` defines the floors, which need
--machine and our side's file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from floor import Costs, Floor, Rates, Window, floor_of

OURS, THEIRS = "sametoken", "vllm"
Record = dict[str, Any]
Results = dict[str, list[Record]]


def read(paths: Iterable[Path]) -> tuple[dict[tuple[str, str], Record], Record | None]:
    """Records by engine and configuration, and the machine's figures."""
    records, machine = {}, None
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        if "machine" in found:
            machine = found["machine"]
        elif "engine" in found:
            records[found["engine"], found["config"]] = found
    return records, machine


def report(records: dict[tuple[str, str], Record], machine: Record | None) -> str:
    """Everything, in Markdown."""
    parts = [_machine(machine)] if machine else []
    for config in dict.fromkeys(config for _, config in records):
        ours, theirs = (records.get((engine, config)) for engine in (OURS, THEIRS))
        parts += [f"## {config}", _side_by_side(_results(ours), _results(theirs))]
        if ours and machine:
            parts.append(_floors(ours, _results(ours), _results(theirs), machine))
        if options := _option_table(_results(ours), _results(theirs)):
            parts.append(options)
        if config.startswith("ngram"):
            parts.append(_beside_plain(records, config))
        parts += [text for one in (ours, theirs) if one for text in _remarks(one)]
    return "\n\n".join(parts) + "\n"


def _results(record: Record | None) -> Results:
    """Group results by load, in the order in which they ran."""
    found: Results = {}
    for one in record["results"] if record else ():
        found.setdefault(one["load"], []).append(one)
    return found


def _median(results: list[Record] | None, name: str) -> float | None:
    values = [one[name] for one in results or () if one[name] is not None]
    return statistics.median(values) if values else None


def _machine(machine: Record) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in machine["products"].items())
    return (
        f"{machine['device']}, torch {machine['torch']}: products of {machine['rows']} rows, "
        f"TFLOP/s: {rates}; reading {machine['read'] / 1e12:.2f} TB/s ({machine['read_by']}), "
        f"copying {machine['copy'] / 1e12:.2f} TB/s read and written"
    )


def _table(headings: list[str], rows: list[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, marks, *rows])


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"


def _loads(ours: Results, theirs: Results) -> list[str]:
    return list(dict.fromkeys([*ours, *theirs]))


def _side_by_side(ours: Results, theirs: Results) -> str:
    rows = []
    for load in _loads(ours, theirs):
        cells = [load]
        for name, digits, more_is_better in (
            ("tokens_per_second", 0, True),
            ("step_ms", 2, False),
            ("ttft_mean_ms", 0, False),
            ("ttft_max_ms", 0, False),
            ("tokens_per_window", 2, True),
        ):
            their, our = _median(theirs.get(load), name), _median(ours.get(load), name)
            ratio = _ratio(our, their) if more_is_better else _ratio(their, our)
            cells += [_number(their, digits), _number(our, digits), ratio]
        rows.append(cells)
    columns = ("tokens/s", "step ms", "mean first token ms", "last first token ms")
    columns += ("tokens a window",)
    return _table(["load", *(c for name in columns for c in (f"vLLM {name}", "ours", "x"))], rows)


def floor_of_result(result: Record, facts: Record, rates: Rates, max_num_seqs: int) -> Floor:
    """Compute the floor of one result."""
    lengths = [(prompt, output) for prompt, output in result["lengths"]]
    window = window_of(facts, result)
    return floor_of(lengths, Costs.of(facts), rates, window, max_num_seqs)


def window_of(facts: Record, result: Record) -> Window:
    """Return the window of synthetic acceptance, or else the measured mean window."""
    if (synthetic := facts.get("synthetic_rates")) is not None:
        return Window(1 + facts["k"], 1 + sum(synthetic))
    windows = result["windows"] or 1
    return Window(1 + result["drafts"] / windows, 1 + result["accepted"] / windows)


def _floors(record: Record, ours: Results, theirs: Results, machine: Record) -> str:
    products = machine["products"].get(record["model"])
    if products is None:
        return f"No floors: the machine's products were not measured for {record['model']}."
    rates = Rates(products, machine["read"], machine["copy"])
    places = record["options"]["max_num_seqs"]
    rows = []
    for load, results in ours.items():
        if results[0]["asked"]:
            continue
        floors = [floor_of_result(one, record["facts"], rates, places) for one in results]

        def floor(pick: Callable[[Floor], float | None], floors: list[Floor] = floors) -> Any:
            values = [value for one in floors if (value := pick(one)) is not None]
            return statistics.median(values) if values else None

        wall, their_wall = _median(results, "wall_s"), _median(theirs.get(load), "wall_s")
        work, steps = floor(lambda one: one.work), floor(lambda one: one.wall)
        whole = floor(lambda one: one.wall + one.attention)
        step = floor(lambda one: _milliseconds(one.step))
        first = floor(lambda one: _milliseconds(one.first_token, one.first_attention))
        cells = [load, *map(_number, (work, steps, whole, wall))]
        cells += [_ratio(wall, one) for one in (work, steps, whole)]
        cells += [_ratio(their_wall, steps)]
        cells += [_number(step), _ratio(_median(results, "step_ms"), step)]
        cells += [_number(first, 0), _ratio(_median(results, "ttft_mean_ms"), first)]
        rows.append(cells)
    headings = ["load", "work s", "floor s", "with attention", "ours s", "ours / work"]
    headings += ["ours / floor", "ours / with attention", "vLLM / floor", "step floor ms"]
    headings += ["ours / it", "first token floor ms", "ours / it"]
    return _table(headings, rows)


def _milliseconds(*seconds: float | None) -> float | None:
    return None if None in seconds else 1e3 * sum(one for one in seconds if one is not None)


def _option_table(ours: Results, theirs: Results) -> str | None:
    """Throughput of batches with an option, relative to the same batch without it."""
    with_options = [load for load in _loads(ours, theirs) if load.startswith("asked: ")]
    if not with_options:
        return None
    rows = []
    for load in with_options:
        cells = [load]
        for results in (theirs, ours):
            rate = _median(results.get(load), "tokens_per_second")
            base = _median(results.get(_base(load, results)), "tokens_per_second")
            cells += [_number(rate, 0), _ratio(rate, base)]
        rows.append(cells)
    return _table(["load", "vLLM tokens/s", "of its base", "ours", "of our base"], rows)


def _base(load: str, results: Results) -> str:
    """Return the base load: greedy for the option temperature, sampled for all others."""
    if "nothing" in load or "temperature" in load:
        return next((one for one in results if "nothing" in one), "")
    at = [one for one in results if "asked: temperature" in one]
    return max(at, key=lambda one: results[one][0]["num_asking"], default="")


def _beside_plain(records: dict[tuple[str, str], Record], config: str) -> str:
    """Compare n-gram drafts with plain decoding of the same engine, on both sides."""
    rows = []
    for engine in (THEIRS, OURS):
        drafted = _results(records.get((engine, config)))
        plain = _results(records.get((engine, "plain")))
        for load, results in drafted.items():
            cells = [f"{engine}: {load}"]
            for name, digits in (("tokens_per_second", 0), ("step_ms", 2)):
                ours, before = _median(results, name), _median(plain.get(load), name)
                cells += [_number(before, digits), _number(ours, digits), _ratio(ours, before)]
            names = ("windows", "drafts", "accepted")
            cells += [_number(_median(results, name), 0) for name in names]
            rows.append(cells)
    headings = ["load", "plain tokens/s", "n-gram", "n-gram / plain"]
    headings += ["plain step ms", "n-gram", "n-gram / plain", "windows", "drafts", "accepted"]
    return _table(headings, rows)


def _remarks(record: Record) -> Iterable[str]:
    """List the loads that did not run, and changes to the weights."""
    side = f"{record['engine']}, {record['config']}"
    lines = [f"- {side}: {one['load']} skipped: {one['why']}" for one in record["skipped"]]
    lines += [f"- {side}: {one['load']} FAILED: {one['why']}" for one in record["failed"]]
    notes = {one["load"]: one["note"] for one in record["results"] if one["note"]}
    lines += [f"- {side}: {load}: {note}" for load, note in notes.items()]
    if not record["results"]:
        lines.append(f"- {side}: nothing was measured")
    if lines:
        yield "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(report(*read(map(Path, sys.argv[1:]))), end="")


if __name__ == "__main__":
    main()

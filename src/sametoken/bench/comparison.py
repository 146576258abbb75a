"""Several runs side by side, as a report shows them, with their numbers unchanged.

A *run* is one file or a directory of files. A *series* is one engine of a run: model, drafter,
tensor parallelism. A *cell* is one series under one workload.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sametoken
from sametoken.bench.documents import read_json
from sametoken.bench.names import EngineNames, numbered
from sametoken.errors import ConfigError, shown

HIGHER, LOWER = "higher", "lower"
THROUGHPUT, LATENCY, SPECULATION = "throughput", "latency", "speculation"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a result.

    Attributes:
        name: key in results.
        label, unit: shown in reports.
        better: ``HIGHER`` or ``LOWER``.
        group: the view that shows it.
    """

    name: str
    label: str
    unit: str
    better: str
    group: str


_TIMES = {
    "ttft": "time to first token",
    "tpot": "time per later token",
    "itl": "time between events",
    "e2e": "time of an answer",
}
METRICS = (
    Metric("tokens_per_second", "output tokens", "tokens/s", HIGHER, THROUGHPUT),
    Metric("decode_tokens_per_second", "decode steps alone", "tokens/s", HIGHER, THROUGHPUT),
    Metric("total_tokens_per_second", "prompt and output", "tokens/s", HIGHER, THROUGHPUT),
    Metric("requests_per_second", "requests", "1/s", HIGHER, THROUGHPUT),
    Metric("goodput", "goodput", "1/s", HIGHER, THROUGHPUT),
    Metric("num_failed", "failed requests", "", LOWER, THROUGHPUT),
    *(
        Metric(f"{name}_{kind}", f"{label}, {kind}", "ms", LOWER, LATENCY)
        for name, label in _TIMES.items()
        for kind in ("mean", "median", "p90", "p99")
    ),
    Metric("step_median", "decode step, median", "ms", LOWER, LATENCY),
    Metric("step_p99", "decode step, p99", "ms", LOWER, LATENCY),
    Metric("floor_fraction", "share of the memory's speed", "", HIGHER, LATENCY),
    Metric("acceptance_length", "acceptance length", "tokens/step", HIGHER, SPECULATION),
    Metric("tokens_per_step", "tokens per request and step", "", HIGHER, SPECULATION),
)
#: The keys that distinguish series, and those that distinguish workloads, with their labels.
ENGINE = {
    "model": "model",
    "drafter": "drafter",
    "num_speculative_tokens": "k",
    "tensor_parallel_size": "TP",
    "dtype": "dtype",
}
WORKLOAD = {
    "benchmark": "benchmark",
    "dataset": "prompts",
    "input_len": "input",
    "output_len": "output",
    "concurrency": "at once",
    "request_rate": "requests/s",
    "temperature": "temperature",
}
_PLAIN, _UNKNOWN = "none", "unknown drafter"


def compare_runs(sources: Sequence[Path], labels: Sequence[str] = ()) -> dict[str, Any]:
    """Build the JSON object of a report.

    Args:
        sources: files written by ``bench``, or directories of ``bench sweep``; the others are
            compared with the first.
        labels: names in the same order; default: those of files, without the ending, and of
            directories.

    Raises:
        ConfigError: a file cannot be read or holds no measurement, or the labels do not match
            the sources.
    """
    if labels and len(labels) != len(sources):
        raise ConfigError(
            f"{len(labels)} labels were given for {len(sources)} runs", "give one for each"
        )
    names = list(labels) or numbered([_name(source) for source in sources])
    if len(set(names)) != len(names):
        raise ConfigError("two runs have the same label", "give different ones")
    runs, cells, failures = [], [], []
    for name, source in zip(names, sources, strict=True):
        files = sorted(source.glob("*.json")) if source.is_dir() else [source]
        documents = [read_json(file) for file in files]
        done = [document for document in documents if "results" in document]
        failed = [document for document in documents if "error" in document]
        try:
            asked = [document["settings"]["asked"] for document in done]
            engines = EngineNames.of([*asked, *(one.get("cell", {}) for one in failed)])
            failures += [_failure(name, document, engines) for document in failed]
            failures += [missing for document in done for missing in _missing(name, document)]
            runs.append(_run(name, done))
            cells += _cells(name, done, engines)
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"run {name!r}, {source}, is no measurement ({type(error).__name__}: {error})",
                "give what bench latency, throughput, serve or sweep wrote",
            ) from error
        if not done and not failed:
            raise ConfigError(f"{source} holds no results", "give what bench wrote")
    return {
        "sametoken": sametoken.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": [asdict(metric) for metric in METRICS],
        "engine": ENGINE,
        "workload": WORKLOAD,
        "runs": runs,
        "cells": cells,
        "failures": failures,
    }


def _name(source: Path) -> str:
    # "." has no name of its own, and a dot in a directory's name begins no ending.
    return source.resolve().name if source.is_dir() else source.stem


def _failure(run: str, document: Mapping[str, Any], engines: EngineNames) -> dict[str, str]:
    """Describe a sweep's cell that has no result."""
    cell = document.get("cell", {})
    drafter, k = _drafts(cell.get("speculative_config"), engines)
    about = {"model": cell.get("model"), "drafter": drafter, "num_speculative_tokens": k}
    about |= {name: cell.get(name) for name in ("output_len", "concurrency", "temperature")}
    return {"run": run, "cell": _in_words(about), "error": str(document["error"])}


def _missing(run: str, document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Describe the loads that ``bench serve`` ended before."""
    return [
        {"run": run, "cell": _in_words(load) or "all at once", "error": "not measured"}
        for load in document.get("missing_loads") or ()
    ]


def _in_words(about: Mapping[str, Any]) -> str:
    names = ENGINE | WORKLOAD
    return ", ".join(f"{names[name]} {value}" for name, value in about.items() if value is not None)


def _run(name: str, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect a run's environment and settings from its documents."""
    environments = [document.get("environment", {}) for document in documents]
    synthetic = [what for document in documents for what in document.get("synthetic", ())]
    return {
        "label": name,
        "synthetic": list(dict.fromkeys(synthetic)),
        "environment": {
            key: _joined(environments, key)
            for key in ("device", "sametoken", "torch", "platform", "date")
        },
        "settings": [document.get("settings", {}) for document in documents[:1]],
    }


def _joined(environments: Sequence[Mapping[str, Any]], key: str) -> str | None:
    values = list(dict.fromkeys(str(e[key]) for e in environments if e.get(key) is not None))
    if key == "date" and len(values) > 1:
        return f"{min(values)} to {max(values)}"
    return ", ".join(values) or None


def _cells(
    run: str, documents: Sequence[Mapping[str, Any]], engines: EngineNames
) -> list[dict[str, Any]]:
    """Collect a run's cells, no two of them with the same engine and workload."""
    cells = [
        _cell(run, document, result, engines)
        for document in documents
        for result in document["results"]
    ]
    seen: Counter[str] = Counter()
    for cell in cells:
        key = json.dumps([cell["engine"], cell["workload"]])
        seen[key] += 1
        # They differ in options that a page does not show, where one would hide the other.
        if seen[key] > 1:
            cell["workload"]["benchmark"] += f" ({seen[key]})"
    return cells


def _cell(
    run: str, document: Mapping[str, Any], result: Mapping[str, Any], engines: EngineNames
) -> dict[str, Any]:
    requested, workload = document["settings"]["asked"], document["workload"]
    resolved = document["settings"].get("resolved", document["settings"].get("server", {}))
    drafter, k = _drafts(requested.get("speculative_config"), engines)
    if drafter == _PLAIN and result.get("acceptance_per_position"):
        # Another engine's server: it counts drafts but does not report its drafter.
        drafter, k = _UNKNOWN, len(result["acceptance_per_position"])
    metrics = [metric.name for metric in METRICS if result.get(metric.name) is not None]
    return {
        "run": run,
        "engine": {
            "model": engines.models[requested["model"]],
            "drafter": drafter,
            "num_speculative_tokens": k,
            "tensor_parallel_size": requested.get("tensor_parallel_size", 1),
            "dtype": resolved.get("dtype"),
        },
        "workload": {
            "benchmark": document["benchmark"],
            "dataset": _prompts(workload),
            "input_len": workload.get("input_len") if _prompts(workload) == "random" else None,
            "output_len": workload.get("output_len"),
            "concurrency": result["concurrency"],
            "request_rate": result.get("request_rate"),
            "temperature": workload.get("temperature"),
        },
        "numbers": {name: _number(result[name]) for name in metrics},
        "repeats": {name: values for name in metrics if len(values := _repeats(result, name)) > 1},
        "acceptance_per_position": [
            _number(rate) for rate in result.get("acceptance_per_position") or ()
        ],
        "timeline": list(result.get("timeline") or ()),
        "traces": list(result.get("traces") or ()),
    }


def _prompts(workload: Mapping[str, Any]) -> str:
    """Name the source of the prompts."""
    return workload.get("dataset") or ("a file" if workload.get("prompts") else "random")


def _repeats(result: Mapping[str, Any], name: str) -> list[float]:
    """Return the metric of each repeat of this cell."""
    return [_number(run[name]) for run in result.get("runs") or () if run.get(name) is not None]


def _number(value: Any) -> float:
    """Return a value that charts can show.

    Raises:
        TypeError: it is no finite number.
    """
    # An int may be beyond every float; NaN fails each comparison.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
    ):
        raise TypeError(f"{shown(value)} is no number")
    return value


def _drafts(spec: Mapping[str, Any] | None, engines: EngineNames) -> tuple[str, int]:
    """The drafter's name and k."""
    if not spec:
        return _PLAIN, 0
    return engines.drafter(spec), int(_number(spec.get("num_speculative_tokens") or 0))

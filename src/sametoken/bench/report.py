"""From records of runs to numbers that can be read, kept and compared.

Percentiles, as every command of ``bench`` means them.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

import sametoken
from sametoken.bench.measure import RequestRecord, Run, StepRecord
from sametoken.bench.roofline import Bandwidth, Traffic
from sametoken.engine.resolve import ResolvedConfig
from sametoken.types.outputs import SpeculationMetrics

_PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """One run of several, for their spread; the names and units of ``Summary``."""

    seconds: float
    num_tokens: int
    tokens_per_second: float
    ttft_median: float
    ttft_p99: float
    tpot_mean: float | None
    tpot_median: float | None
    step_median: float | None
    step_p99: float | None
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request on the time line; seconds since its run began.

    Attributes:
        run: index of the run.
        arrival, first, last: when it was handed over; when its first and last tokens came.
        prompt_len, output_len: tokens.
    """

    run: int
    arrival: float
    first: float
    last: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Runs of one concurrency. Times in milliseconds; None where nothing was to be measured.

    Attributes:
        concurrency: requests at once.
        num_requests, num_tokens: over all runs.
        seconds: of all runs.
        tokens_per_second: emitted tokens over all seconds, prefill included.
        best_tokens_per_second: of the best single run.
        decode_tokens_per_second: tokens of steady decode steps over their time alone.
        ttft_mean, ttft_median, ttft_p99: time to the first token.
        tpot_mean, tpot_median: time per token after the first, per request.
        num_steps: steady decode steps: of the whole batch, after another such step.
        step_median, step_p99: their times.
        tokens_per_step: tokens per request of a steady decode step.
        acceptance_length: emitted tokens per window, the target's own counted.
        acceptance_per_position: accepted over offered at each window position.
        speculation: the counters behind both.
        floor: least time of the mean steady step.
        floor_fraction: the floor over the median: 1 is the memory's full speed.
        runs: every run by itself.
        timeline: every request.
        traces: tokens and windows of a few requests, as ``Trace.as_json`` gives them.
    """

    concurrency: int
    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    best_tokens_per_second: float
    decode_tokens_per_second: float | None
    ttft_mean: float
    ttft_median: float
    ttft_p99: float
    tpot_mean: float | None
    tpot_median: float | None
    num_steps: int
    step_median: float | None
    step_p99: float | None
    tokens_per_step: float | None
    acceptance_length: float | None
    acceptance_per_position: tuple[float, ...]
    floor: float | None
    floor_fraction: float | None
    runs: tuple[RunNumbers, ...] = ()
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    timeline: tuple[RequestTimes, ...] = ()
    traces: tuple[dict[str, Any], ...] = ()


def summarise(
    concurrency: int, runs: Sequence[Run], traffic: Traffic, bandwidth: Bandwidth
) -> Summary:
    """The numbers of one or more runs at the same concurrency."""
    numbers = tuple(_numbers(run) for run in runs)
    requests = [request for run in runs for request in run.requests]
    ttft, tpot = _ttft(requests), _tpot(requests)
    steady = [pair for run in runs for pair in run.steady_steps()]
    times = [1e3 * seconds for seconds, _ in steady]
    median = statistics.median(times) if times else None
    floor = _floor([step for _, step in steady], traffic, bandwidth)
    steady_tokens = sum(step.num_tokens for _, step in steady)
    seconds, num_tokens = sum(n.seconds for n in numbers), sum(n.num_tokens for n in numbers)
    speculation = sum((run.speculation for run in runs), SpeculationMetrics())
    return Summary(
        concurrency=concurrency,
        num_requests=len(requests),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        best_tokens_per_second=max(n.tokens_per_second for n in numbers),
        decode_tokens_per_second=1e3 * steady_tokens / sum(times) if times else None,
        ttft_mean=statistics.fmean(ttft),
        ttft_median=statistics.median(ttft),
        ttft_p99=percentile(ttft, 99),
        tpot_mean=statistics.fmean(tpot) if tpot else None,
        tpot_median=statistics.median(tpot) if tpot else None,
        num_steps=len(times),
        step_median=median,
        step_p99=percentile(times, 99) if times else None,
        tokens_per_step=steady_tokens / sum(step.num_requests for _, step in steady)
        if steady
        else None,
        acceptance_length=_acceptance_length(speculation),
        acceptance_per_position=speculation.acceptance_per_position,
        speculation=speculation,
        floor=floor,
        floor_fraction=floor / median if floor is not None and median else None,
        runs=numbers,
        timeline=tuple(_times(i, run, r) for i, run in enumerate(runs) for r in run.requests),
    )


def _numbers(run: Run) -> RunNumbers:
    num_tokens = sum(request.num_emitted for request in run.requests)
    ttft, tpot = _ttft(run.requests), _tpot(run.requests)
    steps = [1e3 * seconds for seconds, _ in run.steady_steps()]
    return RunNumbers(
        seconds=run.seconds,
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / run.seconds,
        ttft_median=statistics.median(ttft),
        ttft_p99=percentile(ttft, 99),
        tpot_mean=statistics.fmean(tpot) if tpot else None,
        tpot_median=statistics.median(tpot) if tpot else None,
        step_median=statistics.median(steps) if steps else None,
        step_p99=percentile(steps, 99) if steps else None,
        acceptance_length=_acceptance_length(run.speculation),
    )


def _times(index: int, run: Run, request: RequestRecord) -> RequestTimes:
    arrival, first, last = (t - run.start for t in (request.arrival, request.first, request.last))
    return RequestTimes(index, arrival, first, last, request.prompt_len, request.num_emitted)


def _ttft(requests: Sequence[RequestRecord]) -> list[float]:
    return [1e3 * request.time_to_first_token for request in requests]


def _tpot(requests: Sequence[RequestRecord]) -> list[float]:
    return [1e3 * t for request in requests if (t := request.time_per_output_token) is not None]


def _acceptance_length(speculation: SpeculationMetrics) -> float | None:
    return speculation.acceptance_length if speculation.num_draft_tokens else None


def _floor(steps: Sequence[StepRecord], traffic: Traffic, bandwidth: Bandwidth) -> float | None:
    """Least milliseconds of the mean step; None without steps."""
    if not steps:
        return None
    context = statistics.fmean(step.context for step in steps)
    num_requests = statistics.fmean(step.num_requests for step in steps)
    return 1e3 * traffic.step_bytes(context, num_requests) / bandwidth.bytes_per_second


def environment(device: torch.device) -> dict[str, Any]:
    """Where and when this was measured."""
    on_cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sametoken": sametoken.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.machine(),
        "cuda": torch.version.cuda if on_cuda else None,
        "threads": torch.get_num_threads(),
    }


def settings(resolved: ResolvedConfig) -> dict[str, Any]:
    """The engine's options as asked, and what was decided, as values that JSON knows."""
    decided = {
        name: getattr(resolved, name)
        for name in ("max_model_len", "num_kv_blocks", "steps_in_flight", "kernels")
    }
    decided |= {
        name: getattr(resolved, name) for name in ("weights_bytes", "kv_bytes", "recurrent_bytes")
    }
    decided |= {name: str(getattr(resolved, name)) for name in ("dtype", "device", "model_path")}
    return {
        "asked": asdict(resolved.config),
        "resolved": decided | {"architecture": resolved.model.architecture},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of all lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

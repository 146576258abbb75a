"""Summaries of measured runs, with the environment and the settings; percentiles."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import sametoken
from sametoken.bench.measure import RequestRecord, Run, StepRecord
from sametoken.types.outputs import SpeculationMetrics

if TYPE_CHECKING:
    import torch

    from sametoken.bench.roofline import Bandwidth, Traffic
    from sametoken.engine.resolve import ResolvedConfig

_PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """One of several runs, for their spread; names and units as in ``Summary``."""

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
    """One request on the timeline; seconds since its run began.

    Attributes:
        run: index of the run.
        arrival, first, last: when it was added; when its first and last tokens arrived.
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
    """Runs of one concurrency. Times in milliseconds; None without a measurement.

    A steady decode step has the full batch and follows another one that has.

    Attributes:
        concurrency: maximum number of running requests.
        num_requests, num_tokens, seconds: sums over all runs.
        tokens_per_second: emitted tokens over all seconds, prefill included.
        best_tokens_per_second: ``tokens_per_second`` of the best run.
        decode_tokens_per_second: tokens of steady decode steps over their time.
        ttft_mean, ttft_median, ttft_p99: time to the first token.
        tpot_mean, tpot_median: time per token after the first, per request.
        num_steps: number of steady decode steps.
        step_median, step_p99: their times.
        tokens_per_step: tokens per request and steady decode step.
        acceptance_length: emitted tokens per window, the target's own included.
        acceptance_per_position: accepted over offered drafts at each position.
        speculation: the counters behind both.
        floor: minimum time of the mean steady step (roofline).
        floor_fraction: the floor over the median; 1 is full memory bandwidth.
        runs: each run separately.
        timeline: every request.
        traces: tokens and windows of a few requests (``Trace.as_json``).
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
    """Summarize one or more runs at the same concurrency."""
    numbers = tuple(_numbers([run]) for run in runs)
    together = _numbers(runs)
    steady = [pair for run in runs for pair in run.steady_steps()]
    floor = _floor([step for _, step in steady], traffic, bandwidth)
    num_tokens = sum(step.num_tokens for _, step in steady)
    num_requests = sum(step.num_requests for _, step in steady)
    milliseconds = sum(1e3 * seconds for seconds, _ in steady)
    speculation = _speculation(runs)
    median = together.step_median
    return Summary(
        **asdict(together),
        concurrency=concurrency,
        num_requests=sum(len(run.requests) for run in runs),
        best_tokens_per_second=max(n.tokens_per_second for n in numbers),
        decode_tokens_per_second=1e3 * num_tokens / milliseconds if steady else None,
        ttft_mean=statistics.fmean(_ttft(runs)),
        num_steps=len(steady),
        tokens_per_step=num_tokens / num_requests if steady else None,
        acceptance_per_position=speculation.acceptance_per_position,
        speculation=speculation,
        floor=floor,
        floor_fraction=floor / median if floor is not None and median else None,
        runs=numbers,
        timeline=tuple(_times(i, run, r) for i, run in enumerate(runs) for r in run.requests),
    )


def _numbers(runs: Sequence[Run]) -> RunNumbers:
    """The numbers of runs together."""
    requests = [request for run in runs for request in run.requests]
    num_tokens = sum(request.num_emitted for request in requests)
    seconds = sum(run.seconds for run in runs)
    ttft = _ttft(runs)
    tpot = [1e3 * t for one in requests if (t := one.time_per_output_token) is not None]
    steps = [1e3 * seconds for run in runs for seconds, _ in run.steady_steps()]
    speculation = _speculation(runs)
    return RunNumbers(
        seconds=seconds,
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / seconds,
        ttft_median=statistics.median(ttft),
        ttft_p99=percentile(ttft, 99),
        tpot_mean=statistics.fmean(tpot) if tpot else None,
        tpot_median=statistics.median(tpot) if tpot else None,
        step_median=statistics.median(steps) if steps else None,
        step_p99=percentile(steps, 99) if steps else None,
        acceptance_length=speculation.acceptance_length if speculation.num_draft_tokens else None,
    )


def _times(index: int, run: Run, request: RequestRecord) -> RequestTimes:
    arrival, first, last = (t - run.start for t in (request.arrival, request.first, request.last))
    return RequestTimes(index, arrival, first, last, request.prompt_len, request.num_emitted)


def _ttft(runs: Sequence[Run]) -> list[float]:
    return [1e3 * request.time_to_first_token for run in runs for request in run.requests]


def _speculation(runs: Sequence[Run]) -> SpeculationMetrics:
    return sum((run.speculation.metrics() for run in runs), SpeculationMetrics())


def _floor(steps: Sequence[StepRecord], traffic: Traffic, bandwidth: Bandwidth) -> float | None:
    """Compute the minimum milliseconds of the mean step; None without steps."""
    if not steps:
        return None
    context = statistics.fmean(step.context for step in steps)
    num_requests = statistics.fmean(step.num_requests for step in steps)
    return 1e3 * traffic.step_bytes(context, num_requests) / bandwidth.bytes_per_second


def environment(device: torch.device | None) -> dict[str, Any]:
    """Return date, versions and hardware; without a device only the first two.

    The device is None where servers were measured, which are elsewhere.
    """
    versions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sametoken": sametoken.__version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
    }
    if device is None:
        return versions
    import torch

    on_cuda = device.type == "cuda"
    return versions | {
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if on_cuda else f"CPU ({platform.machine()})",
        "cuda": torch.version.cuda if on_cuda else None,
        "threads": torch.get_num_threads(),
    }


def settings(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the engine's requested options and the resolved ones, as JSON values."""
    chosen = {
        name: getattr(resolved, name)
        for name in ("max_model_len", "num_kv_blocks", "steps_in_flight", "kernels")
    }
    chosen |= {
        name: getattr(resolved, name) for name in ("weights_bytes", "kv_bytes", "recurrent_bytes")
    }
    chosen |= {name: str(getattr(resolved, name)) for name in ("dtype", "device", "model_path")}
    return {
        "asked": asdict(resolved.config),
        "resolved": chosen | {"architecture": resolved.model.architecture},
    }


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

"""From records of runs to numbers that can be read, kept and compared."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import sametoken
from sametoken.bench.measure import Run
from sametoken.bench.roofline import Bandwidth, Traffic
from sametoken.core.outputs import SpeculationMetrics
from sametoken.engine.resolve import ResolvedConfig

_PACKAGES = ("torch", "triton", "transformers")


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
        ttft_median, ttft_p99: time to the first token.
        tpot_mean, tpot_median: time per token after the first, per request.
        num_steps: steady decode steps: of the whole batch, after another such step.
        step_median, step_p99: their times.
        tokens_per_step: tokens per request of a steady decode step.
        acceptance_length: emitted tokens per window, the target's own counted.
        acceptance_per_position: accepted over offered at each window position.
        floor: least time of the mean steady step.
        floor_fraction: the floor over the median: 1 is the memory's full speed.
    """

    concurrency: int
    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    best_tokens_per_second: float
    decode_tokens_per_second: float | None
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


def summarise(
    concurrency: int, runs: Sequence[Run], traffic: Traffic, bandwidth: Bandwidth
) -> Summary:
    """The numbers of one or more runs at the same concurrency."""
    requests = [request for run in runs for request in run.requests]
    ttft = [1e3 * request.time_to_first_token for request in requests]
    tpot = [1e3 * t for request in requests if (t := request.time_per_output_token) is not None]
    tokens = [sum(request.num_emitted for request in run.requests) for run in runs]
    steady = [pair for run in runs for pair in run.steady_steps()]
    times = [1e3 * seconds for seconds, _ in steady]
    median = statistics.median(times) if times else None
    floor = None
    if steady:
        context = statistics.fmean(step.context for _, step in steady)
        floor = 1e3 * traffic.step_bytes(context) / bandwidth.bytes_per_second
    steady_tokens = sum(step.num_tokens for _, step in steady)
    speculation = sum((run.speculation for run in runs), SpeculationMetrics())
    return Summary(
        concurrency=concurrency,
        num_requests=len(requests),
        num_tokens=sum(tokens),
        seconds=sum(run.seconds for run in runs),
        tokens_per_second=sum(tokens) / sum(run.seconds for run in runs),
        best_tokens_per_second=max(
            count / run.seconds for count, run in zip(tokens, runs, strict=True)
        ),
        decode_tokens_per_second=1e3 * steady_tokens / sum(times) if times else None,
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
        acceptance_length=speculation.acceptance_length if speculation.num_draft_tokens else None,
        acceptance_per_position=speculation.acceptance_per_position,
        floor=floor,
        floor_fraction=floor / median if floor is not None and median else None,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of all lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


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

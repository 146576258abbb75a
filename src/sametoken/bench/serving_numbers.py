"""Latencies (TTFT, TPOT, ITL, E2E), throughput and goodput of served requests."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sametoken.bench.openai_stream import LoadRun, ServedRequest
from sametoken.bench.report import percentile
from sametoken.bench.scrape import Counters, speculation_of
from sametoken.errors import ConfigError
from sametoken.types.outputs import SpeculationMetrics

#: A request's time to the first token, per later token, and to the last one.
GOAL_METRICS = ("ttft", "tpot", "e2e")
_GOAL = re.compile(r"(\w+):(\d+(?:\.\d+)?)")
#: vLLM's name.
_ALIASES = {"e2el": "e2e"}


@dataclass(frozen=True, slots=True)
class Goal:
    """An upper bound on a request's latency, in milliseconds."""

    metric: str
    limit: float

    def is_met(self, request: ServedRequest) -> bool:
        """Return whether the request meets the bound; one without that latency does."""
        seconds: float | None = getattr(request, self.metric)
        return seconds is None or 1e3 * seconds <= self.limit


def parse_goals(texts: Sequence[str]) -> tuple[Goal, ...]:
    """Parse goals of the form ``ttft:200``; one text may hold several.

    Raises:
        ConfigError: a text is not a goal.
    """
    goals = []
    for text in re.split(r"[\s,]+", " ".join(texts).strip()):
        if not text:
            continue
        match = _GOAL.fullmatch(text)
        metric = _ALIASES.get(match[1], match[1]) if match else ""
        if match is None or metric not in GOAL_METRICS:
            raise ConfigError(
                f"{text!r} is no goal", f"give {', '.join(GOAL_METRICS)} in ms, as in ttft:200"
            )
        goals.append(Goal(metric, float(match[2])))
    return tuple(goals)


def serving_numbers(runs: Sequence[LoadRun], goals: Sequence[Goal]) -> dict[str, Any]:
    """Compute the numbers of all repeats together, and of each one under ``runs``.

    Times are milliseconds: ``ttft``, ``tpot``, ``itl`` (between events) and ``e2e``, each
    with ``_mean``, ``_median``, ``_p90`` and ``_p99``; None without values. Failed requests
    count only in ``num_failed`` and ``errors``.
    """
    each = [_numbers([run], goals) for run in runs]
    return _numbers(runs, goals) | {
        "runs": [{key: value for key, value in run.items() if key != "errors"} for run in each],
        "timeline": [_times(i, run, r) for i, run in enumerate(runs) for r in run.requests],
        "traces": [],
    }


def _numbers(runs: Sequence[LoadRun], goals: Sequence[Goal]) -> dict[str, Any]:
    done = [request for run in runs for request in run.done]
    every = [request for run in runs for request in run.requests]
    seconds = sum(run.seconds for run in runs)
    num_tokens = sum(request.num_tokens for request in done)
    num_prompt = sum(request.num_prompt_tokens or 0 for request in done)
    good = [request for request in done if all(goal.is_met(request) for goal in goals)]
    numbers: dict[str, Any] = {
        "num_requests": len(done),
        "num_failed": len(every) - len(done),
        "errors": dict(Counter(r.error for r in every if r.error is not None)),
        "tokens_counted_by_server": all(request.counted for request in done),
        "num_prompt_tokens": num_prompt,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "requests_per_second": _rate(len(done), seconds),
        "tokens_per_second": _rate(num_tokens, seconds),
        "total_tokens_per_second": _rate(num_tokens + num_prompt, seconds),
        "goodput": _rate(len(good), seconds) if goals else None,
    }
    return numbers | _latencies(done) | _acceptance(runs, done)


def _latencies(done: Sequence[ServedRequest]) -> dict[str, float | None]:
    tpot = [request.tpot for request in done]
    samples = {
        "ttft": [request.ttft for request in done],
        "tpot": [seconds for seconds in tpot if seconds is not None],
        "itl": [later - event for r in done for event, later in pairwise(r.events)],
        "e2e": [request.e2e for request in done],
    }
    numbers: dict[str, float | None] = {}
    for name, values in samples.items():
        ms = [1e3 * value for value in values]
        numbers |= {
            f"{name}_mean": statistics.fmean(ms) if ms else None,
            f"{name}_median": statistics.median(ms) if ms else None,
            f"{name}_p90": percentile(ms, 90) if ms else None,
            f"{name}_p99": percentile(ms, 99) if ms else None,
        }
    return numbers


def _acceptance(runs: Sequence[LoadRun], done: Sequence[ServedRequest]) -> dict[str, Any]:
    """Acceptance from the server's counters, else from the requests."""
    counted = [run.counters for run in runs if run.counters is not None]
    of_server = sum(counted, Counters()).speculation() if len(counted) == len(runs) else None
    of_requests = _reported([r.speculation for r in done if r.speculation])
    shown = of_server or of_requests or {}
    return {
        "acceptance_length": shown.get("acceptance_length"),
        "acceptance_per_position": shown.get("acceptance_per_position", []),
        "speculation": {"metrics": of_server, "requests": of_requests},
    }


def _reported(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Pool the statistics of several requests; None without drafts."""
    steps = sum(one["num_steps"] for one in stats)
    offered = sum(one["num_draft_tokens"] for one in stats)
    if not steps or not offered:
        return None
    accepted = sum(one["num_accepted_tokens"] for one in stats)
    width = max(len(one["acceptance_per_position"]) for one in stats)
    rates = [_pooled(stats, position) for position in range(width)]
    return speculation_of(SpeculationMetrics(steps, offered, accepted), rates)


def _pooled(stats: Sequence[Mapping[str, Any]], position: int) -> float:
    """Accepted over offered drafts of all requests at a position."""
    pairs = [
        (one["offered_per_position"][position], one["acceptance_per_position"][position])
        for one in stats
        if position < len(one["acceptance_per_position"])
    ]
    offered = sum(count for count, _ in pairs)
    return float(sum(count * rate for count, rate in pairs) / offered) if offered else 0.0


def _times(index: int, run: LoadRun, request: ServedRequest) -> dict[str, Any]:
    """One request on the timeline: ``RequestTimes`` and how it ended."""

    def since(moment: float) -> float:
        return moment - run.start

    return {
        "run": index,
        "arrival": since(request.arrival),
        "sent": since(request.sent),
        "first": since(request.events[0]) if request.events else None,
        "last": since(request.events[-1]) if request.events else None,
        "prompt_len": request.num_prompt_tokens,
        "output_len": request.num_tokens,
        "finish_reason": request.finish_reason,
        "speculation": request.speculation,
        "error": request.error,
    }


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0

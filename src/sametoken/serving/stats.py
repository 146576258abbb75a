"""What an engine that serves tells of itself: plain frozen values.

Totals since the server started, over every engine process that it had.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from sametoken.types.outputs import (
    RequestOutput,
    SpeculationMetrics,
)
from sametoken.types.request import RequestUpdate

#: Upper bounds of the step time's buckets, in seconds; one more bucket lies above the last.
STEP_TIME_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 4.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by size.

    Attributes:
        bounds: upper bounds of the buckets, rising.
        counts: observations in each bucket and above the last bound; not cumulative.
        total: the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine process is after a step.

    Attributes:
        num_received: completions that it was sent since it started.
        num_running, num_waiting, num_swapped: completions by where they stand.
        num_waiting_tokens: prompt tokens of those that wait.
        kv_usage: share of the KV blocks that requests hold, 0..1.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and supplied since it
            started.
    """

    num_received: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """Where a replay without speculation said something else.

    Attributes:
        request_id: the completion that was replayed.
        position: output tokens before the first that differs.
        served: the token that was served there.
        replayed: the replay's token; None if the replay ended or failed before it.
    """

    request_id: str
    position: int
    served: int
    replayed: int | None


@dataclass(frozen=True, slots=True)
class AuditStats:
    """Shadow audits since the start.

    Attributes:
        num_audited: completions replayed to their end.
        num_mismatched: of those, how many differed. Anything but 0 is a defect of the engine.
        num_pending: completions that wait for idle time.
        num_dropped: completions that no idle time came for, or whose replay was refused or
            died with its engine process.
        last_difference: the newest mismatch.
    """

    num_audited: int = 0
    num_mismatched: int = 0
    num_pending: int = 0
    num_dropped: int = 0
    last_difference: AuditDifference | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals are since the server's start and outlive restarts of the engine.

    Attributes:
        step_time: seconds per step.
        speculation: of all requests, unfinished ones included. ``offered_per_position[0]`` is
            the number of windows with drafts.
        num_prompt_tokens, num_cached_tokens: of requests that began to emit, and how many of
            those the prefix cache supplied.
        num_output_tokens: tokens emitted, those cut at a stop included.
        num_finished: finished requests by finish reason ("stop", "length", "abort", "error").
        num_failed: requests lost with an engine process.
        num_overloaded: requests refused because too many waited.
        num_restarts: engine processes started after the first.
        ready: whether requests are taken.
        load: the engine process at its last step; zeros while there is none.
        audit: shadow audits.
    """

    step_time: Histogram
    speculation: SpeculationMetrics
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_finished: Mapping[str, int]
    num_failed: int
    num_overloaded: int
    num_restarts: int = 0
    ready: bool = False
    load: EngineLoad = field(default_factory=EngineLoad)
    audit: AuditStats = field(default_factory=AuditStats)

    @property
    def num_wasted_rows(self) -> int:
        """Window rows that were computed for drafts that were not accepted."""
        return self.speculation.num_draft_tokens - self.speculation.num_accepted_tokens


class StatsCollector:
    """Counts what passes; ``snapshot`` gives it out as frozen values."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_failed = 0
        self.num_overloaded = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._finished: Counter[str] = Counter()
        self._step_counts = [0] * (len(STEP_TIME_BOUNDS) + 1)
        self._step_total = 0.0
        # Windows with exactly so many drafts, and with so many accepted.
        self._by_drafts = [0] * (num_speculative_tokens + 1)
        self._by_accepted = [0] * (num_speculative_tokens + 1)

    def count_step(self, seconds: float) -> None:
        """A step took so long."""
        self._step_counts[bisect.bisect_left(STEP_TIME_BOUNDS, seconds)] += 1
        self._step_total += seconds

    def count_update(self, update: RequestUpdate) -> None:
        """A step brought this to a request."""
        if update.samples and not update.failed:
            self._by_drafts[update.num_drafts] += 1
            self._by_accepted[update.num_accepted] += 1
            self._num_output_tokens += len(update.token_ids)

    def count_finished(self, output: RequestOutput) -> None:
        """A request has finished, for the reason of its first completion."""
        self._finished[output.outputs[0].finish_reason or ""] += 1
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_cached_tokens += output.metrics.num_cached_tokens

    def snapshot(self) -> EngineStats:
        """The totals; what is no total is left at its default."""
        return EngineStats(
            step_time=Histogram(STEP_TIME_BOUNDS, tuple(self._step_counts), self._step_total),
            speculation=self._speculation(),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_finished=dict(self._finished),
            num_failed=self.num_failed,
            num_overloaded=self.num_overloaded,
        )

    def _speculation(self) -> SpeculationMetrics:
        return SpeculationMetrics(
            num_steps=sum(self._by_drafts),
            num_draft_tokens=sum(n * count for n, count in enumerate(self._by_drafts)),
            num_accepted_tokens=sum(n * count for n, count in enumerate(self._by_accepted)),
            offered_per_position=_at_least(self._by_drafts),
            accepted_per_position=_at_least(self._by_accepted),
        )


def _at_least(counts: list[int]) -> tuple[int, ...]:
    """From windows with exactly n to windows with n or more, for n = 1 .. k."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]

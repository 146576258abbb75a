"""Statistics of a serving engine: frozen snapshots, and the collector that counts them.

Totals are since the server's start, over all its engine processes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sametoken.types.outputs import RequestOutput, SpeculationCounts, SpeculationMetrics
from sametoken.types.request import RequestUpdate

#: Upper bounds of the step time's buckets in seconds; one more bucket is above the last.
STEP_TIME_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 4.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by size.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        counts: observations in each bucket and above the last bound; not cumulative.
        total: the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of the engine process after a step.

    Attributes:
        num_received: completions received since it started.
        num_running, num_waiting, num_swapped: completions by state.
        num_waiting_tokens: prompt tokens of waiting completions.
        kv_usage: share of the KV blocks that requests hold, 0..1.
        swap_usage: share of the host blocks for swapped KV in use, 0..1.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found since it
            started.
        swapped_prefix_hits: those of them that came from swap space.
        num_preemptions: completions preempted since it started, each time.
        weight_version: of the target's weights.
    """

    num_received: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    swap_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    swapped_prefix_hits: int = 0
    num_preemptions: int = 0
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first token at which a replay without speculation differs.

    Attributes:
        request_id: the replayed completion.
        position: index of the token in the output.
        served: the served token.
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
        num_mismatched: replayed completions that differed. Not 0: a defect of the engine.
        num_pending: completions that wait for idle time.
        num_dropped: completions without idle time, or whose replay was refused or lost with its
            engine process.
        last_difference: the newest mismatch.
    """

    num_audited: int = 0
    num_mismatched: int = 0
    num_pending: int = 0
    num_dropped: int = 0
    last_difference: AuditDifference | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals are since the server's start, over restarts of the engine.

    Attributes:
        step_time: seconds per step.
        speculation: of all requests, finished or not. ``offered_per_position[0]`` is the number
            of windows with drafts.
        num_prompt_tokens, num_cached_tokens: prompt tokens of requests that have ended, and
            those of them from the prefix cache.
        num_output_tokens: tokens of all outputs so far, of aborted requests too; those cut at a
            stop are none.
        num_finished: finished requests by finish reason ("stop", "length", "abort", "error").
        num_failed: requests lost with an engine process.
        num_overloaded: requests refused because the queue was full.
        num_restarts: engine processes started after the first.
        ready: whether requests are accepted.
        load: of requests, at the engine process's last step; zeros without one, and while a
            shadow audit replays.
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
        """Window rows computed for drafts that were not accepted."""
        return self.speculation.num_draft_tokens - self.speculation.num_accepted_tokens


class StatsCollector:
    """Counts steps, updates, tokens and requests; ``snapshot`` returns the totals."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_failed = 0
        self.num_overloaded = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._finished: Counter[str] = Counter()
        self._step_counts = [0] * (len(STEP_TIME_BOUNDS) + 1)
        self._step_total = 0.0
        # From the start with every position of a window.
        positions = [0] * num_speculative_tokens
        self._speculation = SpeculationCounts(offered=positions, accepted=positions.copy())

    def count_step(self, seconds: float) -> None:
        """Count a step and its duration."""
        self._step_counts[bisect.bisect_left(STEP_TIME_BOUNDS, seconds)] += 1
        self._step_total += seconds

    def count_update(self, update: RequestUpdate) -> None:
        """Count the drafts of one request's step."""
        if update.samples and not update.failed:
            self._speculation.add(update.num_drafts, update.num_accepted)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that outputs gained."""
        self._num_output_tokens += num_tokens

    def count_finished(self, output: RequestOutput) -> None:
        """Count a finished request under the finish reason of its first completion."""
        self._finished[output.outputs[0].finish_reason or ""] += 1
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_cached_tokens += output.metrics.num_cached_tokens

    def snapshot(self) -> EngineStats:
        """The totals; the other fields keep their defaults."""
        return EngineStats(
            step_time=Histogram(STEP_TIME_BOUNDS, tuple(self._step_counts), self._step_total),
            speculation=self._speculation.metrics(),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_finished=dict(self._finished),
            num_failed=self.num_failed,
            num_overloaded=self.num_overloaded,
        )

"""Totals since the server started, over every engine process that it had."""

from __future__ import annotations

import bisect
from collections import Counter
from itertools import accumulate

from sametoken.core.outputs import RequestOutput, SpeculationMetrics
from sametoken.core.request import RequestUpdate
from sametoken.engine.stats import STEP_TIME_BOUNDS, EngineStats, Histogram


class Tally:
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
        if update.samples and not update.poisoned:
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

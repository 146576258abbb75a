"""Totals are those of what was counted."""

from __future__ import annotations

from sametoken.serving.stats import STEP_TIME_BOUNDS, StatsCollector
from sametoken.types.outputs import SpeculationMetrics
from sametoken.types.request import RequestUpdate


def update(num_drafts, num_accepted, **changes):
    tokens = () if changes.get("failed") else (7,) * (num_accepted + 1)
    fields = {"samples": True, "num_cached": 0} | changes
    return RequestUpdate("r", tokens, num_drafts, num_accepted, **fields)


def test_speculation_is_counted_with_every_position():
    collector = StatsCollector(4)
    for drafts, accepted in ((0, 0), (3, 3), (3, 1), (2, 0), (1, 1), (3, 2)):
        collector.count_update(update(drafts, accepted))
    stats = collector.snapshot()
    assert stats.speculation == SpeculationMetrics(6, 12, 7, (5, 4, 3, 0), (4, 2, 1, 0))
    assert stats.num_wasted_rows == 12 - 7


def test_rows_that_emit_nothing_are_not_counted():
    collector = StatsCollector(2)
    collector.count_update(update(0, 0, samples=False))
    collector.count_update(update(0, 0, failed=True))
    assert collector.snapshot().speculation.num_steps == 0


def test_without_speculation_there_are_no_positions():
    collector = StatsCollector(0)
    collector.count_update(update(0, 0))
    assert collector.snapshot().speculation.offered_per_position == ()
    assert collector.snapshot().speculation.num_steps == 1


def test_step_times_fall_into_their_buckets():
    collector = StatsCollector(0)
    for seconds in (0.0, STEP_TIME_BOUNDS[0], STEP_TIME_BOUNDS[0] * 1.01, 1e9):
        collector.count_step(seconds)
    times = collector.snapshot().step_time
    assert times.counts == (2, 1, *(0,) * (len(STEP_TIME_BOUNDS) - 2), 1)
    assert times.total > 1e9

"""Loads: Poisson times, the bound on what runs, and records in order."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise

import pytest

from sametoken.bench.openai_stream import Load, run_load
from sametoken.errors import ConfigError


def test_poisson_times_follow_from_the_seed():
    due = Load(request_rate=5.0, seed=1).due(4001)
    assert due == Load(request_rate=5.0, seed=1).due(4001)
    assert due != Load(request_rate=5.0, seed=2).due(4001)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert due[0] == 0.0
    assert min(gaps) > 0
    # Gaps of a Poisson process have mean and deviation 1 / rate.
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)


def test_without_a_rate_all_are_due_at_once():
    assert Load(concurrency=2).due(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"request_rate": 0}, {"request_rate": -1}])
def test_impossible_loads_are_refused(given):
    with pytest.raises(ConfigError, match="is not possible"):
        Load(**given)


def run(load, count):
    """The run, and the most that were sent at once."""
    at_once = most = 0

    async def send(body, record):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001 * (count - record.index))
        record.events, record.num_tokens = [record.arrival + 2.0 + body["n"]], 1
        if body["n"] == 1:
            record.error = "failed"
        at_once -= 1

    done = []
    bodies = [{"n": n} for n in range(count)]
    result = asyncio.run(run_load(send, bodies, load, advance=lambda: done.append(1)))
    assert len(done) == count
    return result, most


def test_no_more_run_at_once_than_asked():
    for concurrency, expected in ((1, 1), (2, 2), (None, 5)):
        result, most = run(Load(concurrency=concurrency), 5)
        assert most == expected
        assert [record.index for record in result.requests] == list(range(5))


def test_failed_requests_are_kept_but_not_done():
    result, _ = run(Load(concurrency=3), 3)
    assert len(result.requests) == 3
    assert [record.index for record in result.done] == [0, 2]
    assert result.seconds == pytest.approx(4.0)

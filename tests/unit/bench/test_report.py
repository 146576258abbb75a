"""Numbers from records, each against the plain definition."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from sametoken.bench.measure import RequestRecord, Run, StepRecord
from sametoken.bench.report import environment, percentile, summarise
from sametoken.bench.roofline import Bandwidth, Traffic
from sametoken.types.outputs import SpeculationCounts

TRAFFIC = Traffic(weights=1000, draft_weights=200, kv_per_token=10)
BANDWIDTH = Bandwidth(1e6, "a test")


def a_run(durations=(0.010, 0.020, 0.030)):
    """Two requests: prompts end after 0.1 s, then decode steps of two tokens per request."""
    run = Run(batch=2)
    now = 0.1
    run.steps.append(StepRecord(now, False, 2, 2, 10))
    now += 0.005
    run.steps.append(StepRecord(now, True, 2, 4, 12))
    for index, duration in enumerate(durations):
        now += duration
        run.steps.append(StepRecord(now, True, 2, 4, 16 + 4 * index))
        run.speculation.add(3, 1)
    run.seconds = now
    num_tokens = 1 + 2 * (1 + len(durations))
    for _ in range(2):
        run.requests.append(RequestRecord(5, num_tokens, 0.0, 0.1, now, 1, num_tokens))
    return run


def test_the_numbers_of_one_run():
    summary = summarise(2, [a_run()], TRAFFIC, BANDWIDTH)
    assert (summary.num_requests, summary.num_tokens) == (2, 18)
    assert summary.tokens_per_second == pytest.approx(18 / 0.165)
    assert summary.decode_tokens_per_second == pytest.approx(12 / 0.060)
    assert summary.ttft_median == pytest.approx(100.0)
    assert summary.tpot_mean == pytest.approx(65 / 8)
    assert (summary.num_steps, summary.step_median) == (3, pytest.approx(20.0))
    assert summary.step_p99 == pytest.approx(29.8)
    assert summary.tokens_per_step == 2.0
    assert summary.acceptance_length == 2.0
    assert summary.acceptance_per_position == (1.0, 0.0, 0.0)
    # (1000 + 200 + 10 * 20 bytes) at 1 MB/s take 1.4 ms.
    assert summary.floor == pytest.approx(1.4)
    assert summary.floor_fraction == pytest.approx(1.4 / 20)


def test_runs_are_pooled_and_the_best_is_named():
    slow, fast = a_run((0.1, 0.1)), a_run((0.01, 0.01))
    summary = summarise(2, [slow, fast], TRAFFIC, BANDWIDTH)
    assert summary.num_steps == 4
    assert summary.seconds == pytest.approx(slow.seconds + fast.seconds)
    assert summary.best_tokens_per_second == pytest.approx(14 / fast.seconds)
    assert summary.tokens_per_second == pytest.approx(28 / summary.seconds)


def test_what_was_not_there_to_measure_is_none():
    run = Run(batch=1, seconds=0.1)
    run.requests.append(RequestRecord(5, 1, 0.0, 0.1, 0.1, 1, 1))
    run.steps.append(StepRecord(0.1, False, 1, 1, 5))
    run.speculation = SpeculationCounts()
    summary = summarise(1, [run], TRAFFIC, BANDWIDTH)
    for name in ("tpot_mean", "step_median", "decode_tokens_per_second", "acceptance_length"):
        assert getattr(summary, name) is None
    assert summary.floor is None
    assert summary.floor_fraction is None


@pytest.mark.parametrize("count", [1, 2, 100, 101])
def test_percentiles_interpolate_as_statistics_does(count):
    values = [float((7 * i) % count) for i in range(count)]
    assert percentile(values, 50) == statistics.median(values)
    if count > 1:
        expected = statistics.quantiles(values, n=100, method="inclusive")[98]
        assert percentile(values, 99) == pytest.approx(expected)


def test_the_environment_says_where_and_when():
    facts = environment(torch.device("cpu"))
    assert {"date", "sametoken", "torch", "device", "threads"} <= facts.keys()
    assert json.dumps(facts)


def test_every_run_and_every_request_is_kept():
    slow, fast = a_run((0.1, 0.1)), a_run((0.01, 0.01))
    slow.start = fast.start = -0.5
    summary = summarise(2, [slow, fast], TRAFFIC, BANDWIDTH)
    assert [run.tokens_per_second for run in summary.runs] == [
        pytest.approx(14 / slow.seconds),
        pytest.approx(14 / fast.seconds),
    ]
    assert [run.step_median for run in summary.runs] == [pytest.approx(100.0), pytest.approx(10.0)]
    assert summary.runs[0].ttft_p99 == pytest.approx(100.0)
    assert [times.run for times in summary.timeline] == [0, 0, 1, 1]
    times = summary.timeline[0]
    assert (times.arrival, times.first) == (0.5, pytest.approx(0.6))
    assert times.last == pytest.approx(slow.seconds + 0.5)
    assert (times.prompt_len, times.output_len) == (5, 7)
    assert summary.traces == ()

"""A real server under stress: right, quick, empty at the end, small.

``SAMETOKEN_STRESS_REQUESTS`` sets the crowd's number; ``benchmarks/stress/stress.py`` sends 100,000
to any model.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from helpers.chat_model import write_chat_model
from helpers.scripts import imported

NUM_REQUESTS = int(os.environ.get("SAMETOKEN_STRESS_REQUESTS", "64"))
MODULES = ("stress", "attackers", "bombs", "cases", "connections", "crowd", "judge", "server")
#: Half requests are to end within a short test.
TIMEOUTS = {"header_timeout": 2.0, "body_timeout": 2.0}


@pytest.fixture(scope="module")
def stress():
    with imported("stress", *MODULES) as modules:
        yield modules


def test_a_server_under_stress_stays_right_quick_and_small(stress, tmp_path, monkeypatch):
    monkeypatch.setattr(stress.cases, "NUM_CASES", 32)
    model = write_chat_model(tmp_path / "model")
    # Other tests run beside, and caches are still filling: a long stress test has its own limits.
    # A queue that filled while the engine was away is worked off slowly beside busy processes.
    limits = stress.judge.Limits(
        health_s=5.0, gap_s=10.0, bomb_s=60.0, half_open_s=60.0, growth_mib=500.0, turned_away=20
    )
    plan = stress.stress.Plan(
        num_requests=NUM_REQUESTS,
        num_clients=8,
        num_half_openers=2,
        num_kills=1,
        bomb_pause_s=0.5,
        limits=limits,
        options=TIMEOUTS,
    )
    result = stress.stress.run_stress_test(str(model), plan)
    missed = {name: one for name, one in result.criteria().items() if not one["passed"]}
    assert not missed, (missed, result.seen()["faults"], dict(result.tally.lost))
    tally = result.tally
    assert NUM_REQUESTS <= tally.sent["crowd"] < NUM_REQUESTS + 8 * 4
    # Whatever was sent again came to an end once.
    ended = sum(count for name, count in tally.fates.items() if not name.startswith("closed"))
    assert ended == tally.sent["crowd"] + stress.cases.NUM_LONG
    assert tally.fates["whole"] + tally.fates["streamed"] > NUM_REQUESTS // 3
    for fate in ("refused", "sent by half", "pipelined", "sent in pieces"):
        assert tally.fates[fate] > 0, fate
    # Where tokens are slow, those who would leave in mid-stream leave before the first.
    assert tally.fates["left before a token"] + tally.fates["left in mid-stream"] > 0
    assert tally.sent["bomber"] > 10
    assert any(name.startswith("closed") for name in tally.fates)
    assert result.counted[stress.judge.RESTARTS] == result.num_kills == 1
    assert result.num_met == stress.cases.NUM_LONG
    assert result.counted[stress.judge.ACCEPTED] > 0
    assert Counter(end for _, _, end in result.neighbour["ends"])["right"] > 0


def said(stress, token_ids, text, finish_reason=None, logprobs=()):
    return stress.cases.Completion(list(token_ids), text, list(logprobs), finish_reason)


def test_wrong_answers_are_found(stress):
    """What it is there for: an answer that differs is named."""
    whole = said(stress, (1, 2, 4), "abd", "stop", (-0.5, -1.0, -1.5))
    case = stress.cases.Case("/v1/completions", {}, (whole,))
    for one, is_whole, is_wrong, is_beginning in (
        (whole, True, False, True),
        (said(stress, (1, 2), "ab"), False, False, True),
        (said(stress, (1, 2, 3), "abd", "stop", whole.logprobs), True, True, False),
        (said(stress, (1, 2, 4), "abc", "stop", whole.logprobs), True, True, False),
        (said(stress, (1, 2, 4), "abd", "length", whole.logprobs), True, True, True),
        (said(stress, (1, 2, 4), "abd", "stop", (-0.5, -1.0, -1.25)), True, True, False),
        (said(stress, (1, 2), "ab", "stop"), True, True, True),
        (said(stress, (1, 5), "a"), False, False, False),
        (said(stress, (1,), "b"), False, False, False),
    ):
        tally = stress.crowd.StatsCollector()
        tally.check(case, stress.cases.Answer({0: one}, is_whole))
        assert (len(tally.wrong), len(tally.no_beginning)) == (is_wrong, not is_beginning), one
    tally = stress.crowd.StatsCollector()
    tally.check(case, stress.cases.Answer({0: whole, 1: whole}, is_whole=True))
    assert tally.wrong
    assert tally.no_beginning


def test_pieces_of_an_answer_add_up(stress):
    answer = stress.cases.Answer()
    answer.take({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    answer.take({"choices": [{"index": 1, "delta": {"content": "z"}, "token_ids": [9]}]})
    logprobs = {"content": [{"logprob": -0.25}]}
    answer.take(
        {
            "choices": [
                {"index": 0, "delta": {"content": "a"}, "token_ids": [1], "logprobs": logprobs}
            ]
        }
    )
    answer.take(
        {
            "choices": [
                {
                    "index": 0,
                    "text": "b",
                    "token_ids": [3],
                    "logprobs": {"token_logprobs": [-0.5]},
                    "finish_reason": "length",
                }
            ]
        }
    )
    assert answer.completions[0] == said(stress, (1, 3), "ab", "length", (-0.25, -0.5))
    assert answer.completions[1] == said(stress, (9,), "z")


HEALTHY = [(1.0, 0.01, 200)]


def right(stress, **changes):
    """What came of a stress test without a fault, except for changes."""
    held = {
        f"{process}_{what}": 10.0 for process in ("server", "engine") for what in stress.judge.HELD
    }
    tally = stress.crowd.StatsCollector()
    tally.sent["crowd"] = 100
    values = {
        "limits": stress.judge.Limits(),
        "seconds": 10.0,
        "tally": tally,
        "times": stress.attackers.Times([[2.0, 3.0]]),
        "num_kills": 1,
        "samples": [{"at_s": float(i), **held} for i in range(8)],
        "neighbour": {
            "health": HEALTHY,
            "waits": [(1.0, 0.5, 0), (1.5, 0.1, 1)],
            "ends": [(1.0, 0.6, "right"), (2.5, 0.1, "engine_dead")],
        },
        "left": {"num_requests_running": 0.0},
        "counted": dict.fromkeys(stress.judge.COUNTED, 0.0) | {stress.judge.RESTARTS: 1.0},
        "num_met": 8,
        "exit_code": 0,
        "num_tracebacks": 0,
        "log_bytes": 1000,
    }
    return stress.judge.StressResult(**values | changes)


def test_every_fault_is_found(stress):
    assert right(stress).is_right
    waits, ends = [(1.0, 0.5, 0), (1.5, 0.1, 1)], [(1.0, 0.6, "right")]
    neighbour = {"health": HEALTHY, "waits": waits, "ends": ends}
    counted = right(stress).counted
    for fault in (
        {"neighbour": neighbour | {"health": [(1.0, 1.2, 200)]}},
        {"neighbour": neighbour | {"health": [(1.0, 0.1, 503)]}},
        {"neighbour": neighbour | {"waits": [*waits, (4.0, 2.5, 3)]}},
        {"neighbour": neighbour | {"ends": [(1.0, 0.6, "wrong")]}},
        {"neighbour": neighbour | {"ends": [(5.0, 0.6, "engine_dead")]}},
        {"left": {"num_requests_running": 1.0}},
        {"counted": counted | {stress.judge.RESTARTS: 2.0}},
        {"counted": counted | {stress.judge.DIFFERENCES: 1.0}},
        {"exit_code": None},
        {"exit_code": -9},
        {"num_tracebacks": 1},
        {"log_bytes": 10**6},
    ):
        assert not right(stress, **fault).is_right, fault
    for kind in ("crowd", "bomber", "half-openers", "killer", "drain"):
        tally = right(stress).tally
        tally.lose(kind, "500")
        assert not right(stress, tally=tally).is_right, kind


def test_a_long_gap_while_there_is_no_engine_is_no_fault(stress):
    waits = [(1.0, 0.5, 0), (1.5, 0.1, 1), (2.5, 6.0, 2)]
    ends = [(1.0, 7.5, "right")]
    neighbour = {"health": [*HEALTHY, (2.1, 0.1, 503)], "waits": waits, "ends": ends}
    assert right(stress, neighbour=neighbour).is_right


def test_growth_is_of_the_most_that_was_held(stress):
    """From the first half to the last quarter; a process that began anew in between is small."""
    values = [10.0, 20.0, 61.0, 0.0, 100.0, 12.0, 40.0, 76.0]
    samples = right(stress).samples
    samples = [one | {"engine_mib": mib} for one, mib in zip(samples, values, strict=True)]
    result = right(stress, samples=samples)
    assert result.growth()["engine_mib"] == 15.0
    assert result.growth()["server_mib"] == 0.0
    assert result.peaks()["engine_mib"] == 100.0
    grown = [one | {"server_threads": one["at_s"] * 3} for one in samples]
    assert not right(stress, samples=grown).is_right


def test_answers_to_bombs_are_looked_at(stress):
    fault_of, head = stress.attackers.fault_of, stress.connections.Head
    error = b'{"error": {"message": "no", "type": "t", "param": null, "code": null}}'
    as_json, as_events = {"content-type": "application/json"}, {"content-type": "text/event-stream"}
    done = b"data: [DONE]\n\n"
    assert fault_of(head(400, as_json), error) == ""
    assert fault_of(head(503, as_json | {"retry-after": "1"}), error) == ""
    assert fault_of(head(200, as_json), b"{}") == ""
    assert fault_of(head(200, as_events), b'data: {"choices": []}\n\n' + done) == ""
    for status, headers, body in (
        (500, as_json, error),
        (503, as_json, error),
        (400, as_json, b"Bad Request"),
        (400, as_json, b'{"detail": "no"}'),
        (200, as_events, b'data: {"choices": []}\n\n'),
        (200, as_events, b'data: {"error": {"type": "server_error"}}\n\n' + done),
    ):
        assert fault_of(head(status, headers), body), (status, body)


def test_mutations_are_bytes_and_follow_from_the_seed(stress):
    made = [stress.bombs.mutation(random.Random(number)) for number in range(50)]
    assert made == [stress.bombs.mutation(random.Random(number)) for number in range(50)]
    valid = {stress.bombs.dump(body).encode() for _, body in stress.bombs.VALID}
    assert len({content for _, content in made} - valid) > 40


def test_an_engine_that_nobody_ended_may_not_die(stress):
    times = stress.attackers.Times()
    assert not times.since(0.0)
    times.windows.append([time.monotonic(), float("inf")])
    assert times.since(time.monotonic())
    times.windows[0][1] = times.windows[0][0]
    assert not times.since(time.monotonic() + 1.0)

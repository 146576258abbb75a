"""Latencies, goodput and acceptance of served requests, each against the plain definition."""

from __future__ import annotations

import statistics

import pytest

from sametoken.bench.openai_stream import LoadRun, ServedRequest
from sametoken.bench.scrape import Counters
from sametoken.bench.serving_numbers import Goal, parse_goals, serving_numbers
from sametoken.errors import ConfigError


def served(index, events, num_tokens, error=None, speculation=None):
    record = ServedRequest(index, 100.0, sent=100.5, events=list(events), num_tokens=num_tokens)
    record.num_prompt_tokens, record.counted = 10, True
    record.error, record.speculation = error, speculation
    return record


def a_run():
    """Two answers, of five tokens in three events and of one token, and one failure."""
    long = served(0, (101.0, 101.4, 102.0), 5)
    short = served(1, (103.0,), 1)
    return LoadRun(100.0, [long, short, served(2, (), 0, error="HTTP 503: busy")])


def test_every_number_by_its_definition():
    numbers = serving_numbers([a_run()], ())
    assert (numbers["num_requests"], numbers["num_failed"]) == (2, 1)
    assert numbers["errors"] == {"HTTP 503: busy": 1}
    assert numbers["seconds"] == pytest.approx(3.0)
    assert numbers["tokens_per_second"] == pytest.approx(6 / 3)
    assert numbers["total_tokens_per_second"] == pytest.approx(26 / 3)
    assert numbers["requests_per_second"] == pytest.approx(2 / 3)
    ttft = [500.0, 2500.0]
    assert numbers["ttft_mean"] == pytest.approx(statistics.fmean(ttft))
    assert numbers["ttft_median"] == pytest.approx(1500.0)
    assert numbers["ttft_p90"] == pytest.approx(500 + 0.9 * 2000)
    assert numbers["tpot_mean"] == numbers["tpot_p99"] == pytest.approx(1000 / 4)
    assert numbers["itl_mean"] == pytest.approx(500.0)
    assert numbers["itl_p99"] == pytest.approx(400 + 0.99 * 200)
    assert numbers["e2e_median"] == pytest.approx(2000.0)
    assert numbers["goodput"] is None
    assert numbers["acceptance_length"] is None


def test_goodput_counts_requests_that_keep_every_goal():
    goals = parse_goals(["ttft:600", "tpot:300"])
    assert serving_numbers([a_run()], goals)["goodput"] == pytest.approx(1 / 3)
    assert serving_numbers([a_run()], parse_goals(["ttft:400"]))["goodput"] == 0.0
    # A request of one token has no time per later token, and so keeps that goal.
    assert serving_numbers([a_run()], parse_goals(["tpot:1"]))["goodput"] == pytest.approx(1 / 3)


def test_goals_as_vllm_spells_them_and_otherwise():
    expected = (Goal("ttft", 200.0), Goal("tpot", 50.5), Goal("e2e", 9.0))
    assert parse_goals(["ttft:200 tpot:50.5,e2el:9"]) == expected
    assert parse_goals([]) == ()
    for wrong in ("ttft", "ttft:", "itl:5", "ttft:-1", "ttft:200ms"):
        with pytest.raises(ConfigError, match="is no goal"):
            parse_goals([wrong])


def test_repeats_are_pooled_and_kept():
    numbers = serving_numbers([a_run(), a_run()], ())
    assert (numbers["num_requests"], numbers["num_failed"], len(numbers["runs"])) == (4, 2, 2)
    assert numbers["runs"][1]["tokens_per_second"] == pytest.approx(2.0)
    assert [times["run"] for times in numbers["timeline"]] == [0, 0, 0, 1, 1, 1]
    failed = numbers["timeline"][2]
    assert (failed["error"], failed["first"], failed["last"]) == ("HTTP 503: busy", None, None)
    assert numbers["timeline"][0] | {"first": 1.0} == numbers["timeline"][0]


def test_nothing_answered_is_zero_and_none():
    run = LoadRun(100.0, [served(0, (), 0, error="refused")])
    numbers = serving_numbers([run], parse_goals(["ttft:1"]))
    assert (numbers["tokens_per_second"], numbers["goodput"], numbers["num_failed"]) == (
        0.0,
        0.0,
        1,
    )
    assert numbers["ttft_p99"] is None


def stats(steps, offered, accepted, rates):
    return {
        "num_steps": steps,
        "num_draft_tokens": sum(offered),
        "offered_per_position": offered,
        "num_accepted_tokens": accepted,
        "acceptance_per_position": rates,
    }


def test_requests_reports_are_pooled_draft_by_draft():
    """The first had one draft in nine steps, and one after it; the second had three in three."""
    told = [stats(9, [1, 1], 2, [1.0, 1.0]), stats(3, [3], 0, [0.0])]
    requests = [served(i, (101.0,), 1, speculation=one) for i, one in enumerate(told)]
    numbers = serving_numbers([LoadRun(100.0, requests)], ())
    assert numbers["acceptance_length"] == pytest.approx(1 + 2 / 12)
    assert numbers["acceptance_per_position"] == pytest.approx([1 / 4, 1.0])
    assert numbers["speculation"]["metrics"] is None


def test_the_servers_counters_come_first():
    run = a_run()
    run.counters = Counters(
        {
            "spec_decode_num_drafts_total": 10,
            "spec_decode_num_draft_tokens_total": 20,
            "spec_decode_num_accepted_tokens_total": 5,
        },
        {"spec_decode_num_accepted_tokens_per_pos_total": {0: 4, 1: 1}},
    )
    numbers = serving_numbers([run], ())
    assert numbers["acceptance_length"] == pytest.approx(1.5)
    assert numbers["acceptance_per_position"] == pytest.approx([0.4, 0.1])
    # Counters of one run of two are not those of both.
    assert serving_numbers([run, a_run()], ())["acceptance_length"] is None

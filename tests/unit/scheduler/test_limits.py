"""Limits, and requests that are refused by them."""

from __future__ import annotations

import pytest

from sametoken.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("longest_chunk", 0),
        ("block_size", 0),
        ("num_blocks", 0),
        ("max_model_len", 1),
        ("num_speculative_tokens", -1),
        ("lookahead_slots", -1),
        ("lookahead_tokens", -1),
    ],
)
def test_impossible_limits_are_named(kit, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        kit.limits(**{name: value})
    assert getattr(kit.limits(**{name: value + 1}), name) == value + 1


def test_blocks_are_rounded_up(kit):
    limits = kit.limits(block_size=4)
    assert [limits.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("prompt_len", "max_total", "message"),
    [
        (0, 8, "'r' has an empty prompt"),
        (64, 64, "prompt of 64 tokens but max_model_len=64 leaves room for 63"),
        (10, 10, r"max_total_tokens=10\. Use a number from 11 .* to 64"),
        (10, 65, r"max_total_tokens=65\. Use a number from 11 .* to 64"),
        (10, 30, "may need 9 KV blocks for 30 tokens but there are 8"),
    ],
)
def test_requests_that_can_never_run_are_refused(kit, prompt_len, max_total, message):
    scheduler = kit.scheduler(num_blocks=8, lookahead_slots=3)
    with pytest.raises(RequestError, match=message):
        scheduler.add(kit.request("r", prompt_len, max_total))
    assert not scheduler.has_unfinished


def test_the_longest_possible_request_is_taken(kit):
    scheduler = kit.scheduler(num_blocks=8, lookahead_slots=3)
    scheduler.add(kit.request("r", 10, 29))
    for _ in range(19):
        kit.step(scheduler)
    assert scheduler.kv_usage == 1.0


def test_a_prompt_leaves_room_for_one_token(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 63, 64))
    assert kit.rows(scheduler.plan()) == [(0, 63, 0, True)]


def test_an_id_is_taken_until_its_request_is_released(kit):
    scheduler = kit.scheduler()
    scheduler.add(kit.request("r", 3))
    with pytest.raises(RequestError, match="'r' already exists"):
        scheduler.add(kit.request("r", 5))
    plan = scheduler.plan()
    scheduler.release("r")
    scheduler.add(kit.request("r", 5))
    assert scheduler.process_output(kit.result(plan)) == ()
    assert kit.rows(scheduler.plan()) == [(0, 5, 0, True)]

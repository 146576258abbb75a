"""Bounds of a server, and the bound on its queue."""

from __future__ import annotations

import dataclasses

import pytest

from sametoken.errors import ConfigError, OverloadedError
from sametoken.serving.limits import QueueBound, ServingLimits
from sametoken.serving.stats import EngineLoad


def test_every_option_has_a_help_text():
    for field in dataclasses.fields(ServingLimits):
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_waiting", -1),
        ("max_waiting", 1.5),
        ("max_waiting_tokens", True),
        ("max_restarts", -1),
        ("max_restarts", 1001),
        ("shadow_audit_rate", "0.5"),
        ("step_timeout_s", None),
        ("shadow_audit_rate", 1.1),
        ("shadow_audit_rate", float("nan")),
        ("restart_window_s", -1.0),
        ("restart_backoff_s", float("nan")),
        ("step_timeout_s", -1.0),
    ],
)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}="):
        ServingLimits(**{name: value})


def test_the_edges_are_possible():
    ServingLimits(0, 0, 1.0, 0, 0.0, 0.0, 0.0)


def bound(max_num_seqs=4, **limits):
    return QueueBound(ServingLimits(**limits), max_num_seqs)


def refused(queue, *request):
    with pytest.raises(OverloadedError) as caught:
        queue.require_room(*request)
    return caught.value


def test_free_slots_come_first_then_the_line():
    queue = bound(max_waiting=2)
    for _ in range(6):
        queue.require_room(1, 5)
        queue.note_sent(1, 5)
    error = refused(queue, 1, 5)
    assert "3 completions would wait, 2 may" in error.cause
    assert error.retry_after_s == 1.0


def test_completions_of_one_prompt_count_each():
    queue = bound(max_waiting=1)
    queue.require_room(5, 3)
    refused(queue, 6, 3)


def test_what_the_engine_has_received_is_counted_where_it_stands():
    queue = bound(max_waiting=1)
    queue.note_sent(6, 5)
    refused(queue, 1, 5)
    queue.note_load(EngineLoad(num_received=6, num_running=3, num_waiting=0))
    queue.require_room(2, 5)
    refused(queue, 3, 5)


@pytest.mark.parametrize("where", ["num_running", "num_waiting", "num_swapped"])
def test_what_is_on_its_way_or_in_the_engine_is_unfinished(where):
    queue = bound()
    assert not queue.has_unfinished
    queue.note_sent(1, 10)
    queue.note_load(EngineLoad())
    assert queue.has_unfinished, "that report was made before the request came"
    queue.note_load(EngineLoad(num_received=1, **{where: 1}))
    assert queue.has_unfinished
    queue.note_load(EngineLoad(num_received=1))
    assert not queue.has_unfinished


def test_swapped_requests_keep_their_slots():
    queue = bound(max_waiting=0)
    queue.note_load(EngineLoad(num_running=2, num_swapped=2))
    refused(queue, 1, 5)


def test_slots_are_no_use_to_those_who_wait_for_blocks():
    queue = bound(max_waiting=2)
    queue.note_load(EngineLoad(num_running=1, num_waiting=2))
    refused(queue, 1, 5)


def test_prompt_tokens_are_bounded_for_those_who_would_wait():
    queue = bound(max_num_seqs=1, max_waiting=9, max_waiting_tokens=20)
    queue.require_room(1, 1000)
    queue.note_load(EngineLoad(num_running=1, num_waiting=1, num_waiting_tokens=8))
    queue.note_sent(1, 6)
    queue.require_room(1, 6)
    assert "21 prompt tokens would wait, 20 may" in refused(queue, 1, 7).cause


def test_retry_after_follows_how_fast_requests_finish():
    queue = bound(max_num_seqs=1, max_waiting=7)
    queue.note_load(EngineLoad(num_running=1, num_waiting=7))
    for now in (10.0, 12.0, 14.0):
        queue.note_finished(now)
    assert refused(queue, 1, 1).retry_after_s == 8.0
    queue.note_finished(10_000.0)
    assert refused(queue, 1, 1).retry_after_s == 60.0


def test_reset_begins_anew():
    queue = bound(max_waiting=0)
    queue.note_sent(4, 5)
    queue.note_load(EngineLoad(num_received=2, num_running=2))
    refused(queue, 1, 5)
    queue.reset()
    queue.require_room(4, 5)
    queue.note_sent(4, 5)
    queue.note_load(EngineLoad(num_received=4))
    queue.require_room(4, 5)

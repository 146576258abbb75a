"""Completions end by their tokens as the output processor would have it."""

from __future__ import annotations

import pytest

from sametoken.serving.engine_main import StopChecker
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.sampling_params import SamplingParams


def update(*token_ids, **changes):
    return RequestUpdate("r", token_ids, max(len(token_ids) - 1, 0), 0, True, 0, **changes)


@pytest.fixture
def ends():
    ends = StopChecker()
    ends.add(EngineRequest("r", (1, 2, 3), SamplingParams(), 10, stop_token_ids=(0, 9)))
    return ends


def test_a_stop_token_ends_in_mid_window(ends):
    assert ends.take(update(4, 5)) is None
    assert ends.take(update(6, 9, 7)) == 7
    assert ends.take(update(8)) is None


def test_the_length_limit_ends_in_mid_window(ends):
    assert ends.take(update(4, 4, 4, 4, 4)) is None
    assert ends.take(update(4, 4, 4)) == 10


def test_a_stop_token_at_the_limit_ends_once(ends):
    assert ends.take(update(4, 4, 4, 4, 4, 4, 9)) == 10
    assert not ends.discard("r")


def test_poison_is_forgotten_since_the_scheduler_released_it(ends):
    assert ends.take(update(failed=True)) is None
    assert not ends.discard("r")


def test_discarded_ones_are_not_watched(ends):
    assert ends.discard("r")
    assert not ends.discard("r")
    assert ends.take(update(9)) is None

"""StopChecker ends completions where the output processor does."""

from __future__ import annotations

import pytest

from sametoken.serving.engine_main import StopChecker
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)
from sametoken.types.sampling_params import SamplingParams


def update(*token_ids, **changes):
    return RequestUpdate("r", token_ids, max(len(token_ids) - 1, 0), 0, True, 0, **changes)


@pytest.fixture
def checker():
    checker = StopChecker()
    checker.add(EngineRequest("r", (1, 2, 3), SamplingParams(), 10, stop_token_ids=(0, 9)))
    return checker


def test_a_stop_token_ends_in_mid_window(checker):
    assert checker.check(update(4, 5)) is None
    assert checker.check(update(6, 9, 7)) == 7
    assert checker.check(update(8)) is None


def test_the_length_limit_ends_in_mid_window(checker):
    assert checker.check(update(4, 4, 4, 4, 4)) is None
    assert checker.check(update(4, 4, 4)) == 10


def test_a_stop_token_at_the_limit_ends_once(checker):
    assert checker.check(update(4, 4, 4, 4, 4, 4, 9)) == 10
    assert not checker.discard("r")


def test_a_failed_completion_is_dropped_since_the_scheduler_released_it(checker):
    assert checker.check(update(failed=True)) is None
    assert not checker.discard("r")


def test_discarded_ones_are_not_watched(checker):
    assert checker.discard("r")
    assert not checker.discard("r")
    assert checker.check(update(9)) is None

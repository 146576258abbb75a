"""Restarts are bounded within a window, and spaced out."""

from __future__ import annotations

from sametoken.serving.limits import ServingLimits
from sametoken.serving.supervisor import Restarts


def restarts(**options):
    return Restarts(ServingLimits(**options))


def test_each_further_one_waits_twice_as_long_until_none_is_left():
    policy = restarts(max_restarts=3, restart_window_s=100.0, restart_backoff_s=0.5)
    assert [policy.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]


def test_those_outside_the_window_no_longer_count():
    policy = restarts(max_restarts=1, restart_window_s=10.0, restart_backoff_s=2.0)
    assert policy.next_delay(0.0) == 2.0
    assert policy.next_delay(10.0) is None
    assert policy.next_delay(10.5) == 2.0


def test_none_may_be_allowed():
    assert restarts(max_restarts=0).next_delay(0.0) is None

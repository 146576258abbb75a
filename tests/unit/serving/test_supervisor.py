"""Restarts are bounded and spaced out; a wait that takes too long is told once."""

from __future__ import annotations

import asyncio

import pytest

from sametoken.serving.limits import ServingLimits
from sametoken.serving.supervisor import Restarts
from sametoken.serving.watchdog import Watchdog


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


SHORT_S = 0.02


@pytest.fixture
def watch():
    """Runs steps over a watchdog, then says how often it was expired."""

    def run(*steps, timeout_s=SHORT_S):
        async def main():
            expired = []
            watchdog = Watchdog(timeout_s, lambda: expired.append(True))
            for step in steps:
                step(watchdog)
            # Timers run in the order of their times.
            await asyncio.sleep(2 * SHORT_S)
            return len(expired)

        return asyncio.run(main())

    return run


def test_what_does_not_come_is_told_once(watch):
    assert watch(Watchdog.arm) == 1
    assert watch(Watchdog.arm, Watchdog.arm) == 1
    assert watch(Watchdog.arm, Watchdog.disarm, Watchdog.arm) == 1


def test_what_came_or_is_not_waited_for_is_not_told(watch):
    assert watch() == 0
    assert watch(Watchdog.arm, Watchdog.disarm) == 0
    assert watch(Watchdog.disarm, Watchdog.disarm) == 0


def test_no_limit_waits_for_ever(watch):
    assert watch(Watchdog.arm, timeout_s=0.0) == 0


async def test_a_wait_that_goes_on_is_not_begun_anew():
    expired = asyncio.Event()
    watchdog = Watchdog(5 * SHORT_S, expired.set)
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not expired.is_set():
        watchdog.arm()
        assert loop.time() - began < 10, "every call put it off"
        await asyncio.sleep(SHORT_S)

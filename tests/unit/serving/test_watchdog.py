"""The watchdog expires once per timeout, and never while disarmed."""

from __future__ import annotations

import asyncio

import pytest

from sametoken.serving.supervisor import Watchdog

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


def test_a_wait_that_goes_on_is_not_begun_anew():
    async def main():
        expired = asyncio.Event()
        watchdog = Watchdog(5 * SHORT_S, expired.set)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not expired.is_set():
            watchdog.arm()
            assert loop.time() - began < 10, "every call put it off"
            await asyncio.sleep(SHORT_S)

    asyncio.run(main())

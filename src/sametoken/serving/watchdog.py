"""A timer that calls a function if what it waits for does not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls ``expired`` on the event loop if it stays armed for too long.

    Args:
        timeout_s: seconds that it may stay armed; 0: no limit.
        expired: called once each time; it is disarmed then.
    """

    def __init__(self, timeout_s: float, expired: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_armed(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def arm(self, wanted: bool = True) -> None:
        """Start the timer, unless it runs; or stop it, if it is not wanted."""
        if not wanted:
            self.disarm()
        elif self._timer is None and self._timeout_s:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end)

    def disarm(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._expired()

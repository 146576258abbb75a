"""Notices when something that must come does not come any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls ``expired`` on the event loop once it was left waiting for too long.

    Args:
        timeout_s: seconds that waiting may take; 0 for any.
        expired: called once per wait that took too long.
    """

    def __init__(self, timeout_s: float, expired: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Something is to come; a wait that has begun goes on."""
        if self._timer is None and self._timeout_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._expired)

    def rest(self) -> None:
        """It has come, or will not be waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""When a dead engine process may be started again."""

from __future__ import annotations

from collections import deque

from sametoken.engine.serving_limits import ServingLimits


class Restarts:
    """Bounds restarts within a window of time, and spaces them out."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next restart, which is counted; None if none is left.

        Args:
            now: seconds of a monotonic clock.
        """
        while self._times and now - self._times[0] > self._limits.restart_window_s:
            self._times.popleft()
        num_recent = len(self._times)
        if num_recent >= self._limits.max_restarts:
            return None
        self._times.append(now)
        return self._limits.restart_backoff_s * 2.0**num_recent

"""Limits of a server: their options, and admission control of the waiting queue.

The serving process admits requests before the engine reports them, so it counts those in transit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sametoken.config import option
from sametoken.errors import OverloadedError
from sametoken.serving.stats import EngineLoad
from sametoken.types.option_values import require_limits, require_types


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of an engine that serves; they also hold for a restarted engine process.

    Raises:
        ConfigError: a value is of another type, or out of range.
    """

    max_waiting: int = option(
        1024, "completions that may wait for a place, beyond those that run", limits=(0, 2**31)
    )
    max_waiting_tokens: int = option(2**20, "prompt tokens that may wait in all", limits=(0, 2**62))
    shadow_audit_rate: float = option(
        0.0,
        "share of finished requests replayed without speculation in idle time, 0..1",
        limits=(0.0, 1.0),
    )
    max_restarts: int = option(
        3, "restarts of a dead engine process within restart_window_s", limits=(0, 1000)
    )
    restart_window_s: float = option(
        300.0, "seconds over which restarts are counted", limits=(0.0, 86400.0)
    )
    restart_backoff_s: float = option(
        0.5,
        "seconds before the first restart of a window; doubled at each further one",
        limits=(0.0, 86400.0),
    )
    step_timeout_s: float = option(
        300.0,
        "seconds after which a step is hung: the engine is killed and restarted; 0: never",
        limits=(0.0, 86400.0),
    )

    def __post_init__(self) -> None:
        require_types(self)
        require_limits(self)


_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_NUM_FINISH_TIMES = 64


class QueueBound:
    """Admission control over the reported load and the completions in transit to the engine.

    Args:
        limits: how much may wait.
        max_num_seqs: completions that the engine runs at once.
    """

    def __init__(self, limits: ServingLimits, max_num_seqs: int) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._finish_times: deque[float] = deque(maxlen=_NUM_FINISH_TIMES)
        self.reset()

    def reset(self) -> None:
        """Start again, with a new engine process."""
        self.load = EngineLoad()
        self._num_sent = 0
        # Prompt tokens of each completion in transit, the oldest first.
        self._in_transit: deque[int] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether completions are in transit, or in the engine as of its last report."""
        load = self.load
        return bool(self._in_transit or load.num_running or load.num_waiting or load.num_swapped)

    def note_sent(self, num_completions: int, num_prompt_tokens: int) -> None:
        """Count the completions of one prompt that were sent."""
        self._num_sent += num_completions
        self._in_transit.extend([num_prompt_tokens] * num_completions)

    def note_load(self, load: EngineLoad) -> None:
        """Take in a report of the engine."""
        self.load = load
        while len(self._in_transit) > self._num_sent - load.num_received:
            self._in_transit.popleft()

    def note_finished(self, now: float) -> None:
        """Record the end of a request; ``now`` in seconds of a monotonic clock."""
        self._finish_times.append(now)

    def require_room(self, num_completions: int, num_prompt_tokens: int) -> None:
        """Refuse completions of one prompt if too much would wait.

        Raises:
            OverloadedError: with an estimate of the time until half of the queue has begun.
        """
        num_waiting = self._num_waiting(num_completions)
        if num_waiting > self._limits.max_waiting:
            most = self._limits.max_waiting
            self._refuse(num_waiting, f"{num_waiting} completions would wait, {most} may")
        new_tokens = num_completions * num_prompt_tokens
        tokens = self.load.num_waiting_tokens + sum(self._in_transit) + new_tokens
        if num_waiting and tokens > self._limits.max_waiting_tokens:
            most = self._limits.max_waiting_tokens
            self._refuse(num_waiting, f"{tokens} prompt tokens would wait, {most} may")

    def _num_waiting(self, num_new: int) -> int:
        """Completions that would wait; free slots do not count while others wait for blocks."""
        load = self.load
        slots = self._max_num_seqs - load.num_running - load.num_swapped
        free = 0 if load.num_waiting else slots
        return max(0, load.num_waiting + len(self._in_transit) + num_new - free)

    def _refuse(self, num_waiting: int, cause: str) -> None:
        seconds = self._seconds_for(num_waiting / 2)
        raise OverloadedError(cause, f"try again after {seconds:.0f} s", seconds)

    def _seconds_for(self, num_completions: float) -> float:
        times = self._finish_times
        if len(times) < 2:
            return _MIN_RETRY_S
        each = (times[-1] - times[0]) / (len(times) - 1)
        return min(max(num_completions * each, _MIN_RETRY_S), _MAX_RETRY_S)

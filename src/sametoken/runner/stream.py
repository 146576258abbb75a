"""Streams: work enqueued in order, results waited for later.

On a CPU the immediate stream runs work at once; the lagging stream queues it, so that the host
plans without the results, as with an asynchronous device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]

#: Polling interval, far below the time of a step.
_POLL_S = 2e-5


class Event(Protocol):
    """The end of one piece of enqueued work."""

    def wait(self) -> None:
        """Return once the work and all earlier work is done."""
        ...


class Stream(Protocol):
    """Runs work in the order it was submitted."""

    def submit(self, work: Work) -> Event:
        """Enqueue work; may return before it runs."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


#: The end of work that has run.
DONE: Event = _Done()


class ImmediateStream:
    """Runs work inside ``submit``."""

    def submit(self, work: Work) -> Event:
        """Run the work now."""
        work()
        return DONE


class _QueuedEvent:
    def __init__(self, stream: LaggingStream, ordinal: int) -> None:
        self._stream = stream
        self._ordinal = ordinal

    def wait(self) -> None:
        self._stream.run_through(self._ordinal)


class LaggingStream:
    """Runs work as late as possible: when it is waited for.

    Args:
        progress: called with the queue's length after each submit; returns how many of the
            oldest pieces of work to run at that moment (default none).
    """

    def __init__(self, progress: Callable[[int], int] = lambda queued: 0) -> None:
        self._progress = progress
        self._queue: deque[Work] = deque()
        self._submitted = 0

    def submit(self, work: Work) -> Event:
        """Enqueue work."""
        self._queue.append(work)
        self._submitted += 1
        for _ in range(self._progress(len(self._queue))):
            self._queue.popleft()()
        return _QueuedEvent(self, self._submitted)

    def run_through(self, ordinal: int) -> None:
        """Run queued work up to the ``ordinal``-th ever submitted."""
        while self._submitted - len(self._queue) < ordinal:
            self._queue.popleft()()


class CudaStream:
    """The current CUDA stream: work enqueues kernels and returns before they run."""

    def submit(self, work: Work) -> Event:
        """Enqueue the work's kernels and mark their end."""
        work()
        return _RecordedEvent(_mark())


class WatchedCudaStream:
    """The current CUDA stream, where kernels may wait for other processes.

    Args:
        check: called periodically during a wait; raises if the work can never finish.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def submit(self, work: Work) -> Event:
        """Enqueue the work's kernels and mark their end."""
        work()
        return _WatchedEvent(_mark(), self._check)


def _mark() -> torch.cuda.Event:
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()
    return end


class _RecordedEvent:
    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def wait(self) -> None:
        self._end.synchronize()


class _WatchedEvent:
    def __init__(self, end: torch.cuda.Event, check: Callable[[], None]) -> None:
        self._end = end
        self._check = check

    def wait(self) -> None:
        while not self._end.query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(_POLL_S)

"""One thread at a time at an engine, in the order they come."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sametoken.errors import EngineDeadError, RequestError

#: Seconds after which a waiting thread looks whether it was interrupted.
_POLL_S = 0.05


class Exclusive:
    """Guards what threads share: each holds it for a step, then lets the next one in.

    A process that forks keeps it; the fork has neither the threads nor the device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Whoever waits for the lock holds this, so that its last holder does not come first.
        self._next = threading.Lock()
        # Threads that hold the lock or wait for it, once for each time.
        self._inside: list[int] = []
        self._later: deque[Callable[[], None]] = deque()
        self._pid = os.getpid()

    @contextmanager
    def held(self, check: Callable[[], None]) -> Iterator[None]:
        """Wait for a turn and hold it for the block.

        Args:
            check: called now and then while waiting; may raise, which ends the wait.

        Raises:
            EngineDeadError: this process is a fork.
            RequestError: this thread holds it already, or waits for it.
        """
        thread = threading.get_ident()
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"the engine runs in process {self._pid}, and process {os.getpid()} is its fork",
                "load the model in the process that uses it, or start processes by spawn",
            )
        if thread in self._inside:
            raise RequestError(
                "a signal handler or a finalizer called the engine in the midst of its step",
                "let it note what to do, and call the engine from outside",
            )
        self._inside.append(thread)
        try:
            self._acquire(check)
            try:
                self._catch_up()
                yield
            finally:
                self._lock.release()
        finally:
            self._inside.remove(thread)
            self._catch_up_if_free()

    def later(self, work: Callable[[], None]) -> None:
        """Do a short work while nobody holds this: at once, or when whoever does lets go.

        It never waits, so that a finalizer may call it on any thread. In a fork nothing is done.
        """
        if os.getpid() == self._pid:
            self._later.append(work)
            self._catch_up_if_free()

    def _acquire(self, check: Callable[[], None]) -> None:
        _wait(self._next, check)
        try:
            _wait(self._lock, check)
        finally:
            self._next.release()

    def _catch_up_if_free(self) -> None:
        # Looked at again after each release: whoever came meanwhile could not get the lock.
        thread = threading.get_ident()
        while self._later and self._lock.acquire(blocking=False):
            self._inside.append(thread)
            try:
                self._catch_up()
            finally:
                self._inside.remove(thread)
                self._lock.release()

    def _catch_up(self) -> None:
        while self._later:
            self._later.popleft()()


def _wait(lock: threading.Lock, check: Callable[[], None]) -> None:
    while not lock.acquire(timeout=_POLL_S):
        check()

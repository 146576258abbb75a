"""An engine in one object of one process: its lock, and what is left once it was let go."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from sametoken.errors import EngineDeadError, RequestError

#: Seconds between a waiting thread's checks for interrupts.
_POLL_S = 0.05


class NoEngine:
    """What a caller has once its engine was let go: all that is asked of it raises."""

    def stop(self, cause: BaseException) -> None:
        """Nothing runs."""

    def release(self, request_id: str, num_kept_tokens: int | None, *, aborted: bool) -> None:
        """Requests have ended with the engine."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EngineDeadError("the engine of this LLM was let go", "create another LLM")


class NotCopied:
    """What holds a loaded engine, which neither another process nor a second object can have."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{type(self).__name__} holds a loaded engine and cannot be pickled or copied",
            "load the model in the process that uses it; outputs and parameters can be pickled",
        )


class Exclusive:
    """A fair lock around a shared engine; each thread holds it for one step.

    It belongs to the process that created it: a fork has neither the threads nor the device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Held by the next waiter, so that the last holder cannot take the lock again first.
        self._next = threading.Lock()
        # Threads that hold the lock or wait for it, one entry per call.
        self._inside: list[int] = []
        self._later: deque[Callable[[], None]] = deque()
        self._pid = os.getpid()

    @contextmanager
    def held(self, check: Callable[[], None]) -> Iterator[None]:
        """Wait for the lock and hold it for the block.

        Args:
            check: called periodically while waiting; an exception from it ends the wait.

        Raises:
            EngineDeadError: this process is a fork.
            RequestError: this thread already holds the lock or waits for it.
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
        """Run short work under the lock: now if it is free, else when its holder releases it.

        Never blocks, so that a finalizer may call it on any thread. Does nothing in a fork.
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
        # Check again after each release: work queued in between could not get the lock.
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

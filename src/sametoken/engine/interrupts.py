"""Exceptions of signal handlers, deferred while a step runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

#: Signals whose handlers may raise; SIGINT (Ctrl-C) comes first, see ``_restore``.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)

T = TypeVar("T")


class DeferredInterrupts:
    """A block in which exceptions of signal handlers are deferred.

    Handlers run as usual. The first exception, usually ``KeyboardInterrupt``, is raised by
    ``check`` or at the end of the block. A second Ctrl-C is raised at once while ``cuttable``
    work runs. Outside the main thread, and where the interpreter handles no signals, the block
    changes nothing.

    Args:
        on_cut: called with the exception that is about to interrupt ``cuttable`` work.
    """

    def __init__(self, on_cut: Callable[[BaseException], None]) -> None:
        self._on_cut = on_cut
        self._former: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: BaseException | None = None
        self._num_sigints = 0
        self._may_cut = False

    def __enter__(self) -> DeferredInterrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Store all handlers before replacing any: the new handler looks the old one up.
        former = {number: signal.getsignal(number) for number in SIGNALS}
        self._former = {n: handler for n, handler in former.items() if callable(handler)}
        try:
            for number in self._former:
                signal.signal(number, self._handle)
        except ValueError:
            # A subinterpreter's main thread cannot handle signals.
            self._former.clear()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        self.check()

    def check(self) -> None:
        """Raise the deferred exception, if any."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            raise pending

    def cuttable(self, work: Callable[[], T]) -> T:
        """Run long work; a second Ctrl-C interrupts it after calling ``on_cut``."""
        self._may_cut = True
        try:
            return work()
        finally:
            self._may_cut = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._former[number](number, frame)
        except BaseException as error:
            self._num_sigints += number == signal.SIGINT
            if self._may_cut and number == signal.SIGINT and self._num_sigints > 1:
                self._on_cut(error)
                raise
            if self._pending is None:
                self._pending = error

    def _restore(self) -> None:
        # SIGINT last, so that Ctrl-C cannot interrupt this; handlers set since are kept.
        for number, former in reversed(self._former.items()):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)

"""Calls made side by side in forks of this process, for what they leave in files."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Pipe, wait

_INDEX_BYTES = 4


def call_in_forks(
    calls: Sequence[Callable[[], object]], *, most_forks: int, most_seconds: float
) -> None:
    """Make each call in one of several forks; returns when all have ended.

    What a call returns or raises is lost. A fork has this thread alone, so a call that needs a lock
    of another may never end, and forks are killed after ``most_seconds``: the caller must make sure
    of the results. Forks of a process that uses a GPU must not use it.

    Args:
        calls: at most 16,384.
        most_forks: maximum number of forks.
        most_seconds: maximum duration.
    """
    # Pipes that are objects: an interrupt leaves no end open, wherever it comes.
    indices, add_index = Pipe(duplex=False)
    with add_index:
        numbers = b"".join(i.to_bytes(_INDEX_BYTES) for i in range(len(calls)))
        os.write(add_index.fileno(), numbers)
    # Readable once no process can write to it: when the last fork has ended.
    ended, held_by_forks = Pipe(duplex=False)
    forks = []
    try:
        with held_by_forks:
            for _ in range(min(most_forks, len(calls))):
                with suppress(OSError):
                    forks.append(_fork(partial(_call_each, calls, indices.fileno(), os.getpid())))
        # Unlike select it takes any descriptor, also beyond 1023.
        wait([ended], most_seconds)
    finally:
        for fork in forks:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
        indices.close()
        ended.close()


def _fork(work: Callable[[], None]) -> int:
    """The id of a new process that ends after ``work``, whatever happens."""
    with warnings.catch_warnings():
        # Python warns of threads whose locks a fork would wait for.
        warnings.simplefilter("ignore", DeprecationWarning)
        fork = os.fork()
    if fork:
        return fork
    try:
        # Garbage may hold what only the process itself may free.
        gc.disable()
        work()
    finally:
        # Without the exit handlers of the process that it is a copy of.
        os._exit(0)


def _call_each(calls: Sequence[Callable[[], object]], indices: int, parent: int) -> None:
    """Make the calls whose indices this fork is the first to read, while its parent lives."""
    while os.getppid() == parent and (index := os.read(indices, _INDEX_BYTES)):
        with suppress(Exception):
            calls[int.from_bytes(index)]()

"""Waiting for the copies of a swap file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sametoken.io.swap_file import SwapFile


def wait_for_copies(file: SwapFile, hangs: Callable[[], bool] = lambda: False) -> None:
    """Wait for all copies so far: one thread makes them, and what it is given now comes last.

    A thread that ``hangs`` is not waited for.
    """
    ended, deadline = threading.Event(), time.monotonic() + 60
    file._jobs.put(ended.set)
    while not (ended.wait(0.01) or hangs()):
        assert time.monotonic() < deadline

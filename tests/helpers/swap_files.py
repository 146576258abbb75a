"""Waiting for the copies of a swap file."""

from __future__ import annotations

import threading

from sametoken.io.swap_file import SwapFile


def wait_for_copies(file: SwapFile) -> None:
    """Wait for all copies so far: one thread makes them, and what it is given now comes last."""
    ended = threading.Event()
    file._jobs.put(ended.set)
    assert ended.wait(60)

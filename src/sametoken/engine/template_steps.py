"""A bound on what a chat template may run: its author wrote a program, and programs may not end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Lines that one rendering may run. A conversation of 1000 messages takes some 30,000.
MAX_STEPS = 1_000_000

_TEMPLATE = "<template>"


@contextmanager
def bounded_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Within the block, templates that this thread renders run ``most`` lines, loops counted.

    Raises:
        RuntimeError: out of the template, after the last of them.
    """
    left = most

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"it runs more than {most} lines")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _TEMPLATE else None

    outer = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(outer)

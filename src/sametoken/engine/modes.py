"""Modes of torch that the caller's thread is in: an engine computes nothing by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda")
_HOST = torch.device("cpu")


@contextmanager
def without_modes() -> Iterator[None]:
    """A block without the thread's autocast and default device; also a decorator.

    The default dtype is one of all threads, so it is not changed: every tensor names its own
    (tests/architecture/test_dtypes.py).
    """
    with ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != _HOST:
            stack.enter_context(_HOST)
        yield

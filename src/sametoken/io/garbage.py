"""The search for garbage, which a loop that makes many objects starts often."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects after which garbage is searched for: a step of 1,024 requests makes about as many.
_NEW_OBJECTS = 10_000


def exempt_objects() -> None:
    """Leave all objects of this process, which is our own, out of later searches for garbage.

    A search for cycles stops every thread, through the 250,000 objects of a start for 0.1 s. The
    searches among new objects, 14 in a step of 1,024 requests, are one.
    """
    # First, as cycles that are garbage already would stay, with their tensors.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def objects_exempt() -> Iterator[None]:
    """Within, searches for garbage leave out all objects of the time before, in any process.

    Objects that the caller has left out for good stay so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

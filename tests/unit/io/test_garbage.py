"""Objects that no later search for garbage looks at."""

from __future__ import annotations

import gc
import weakref

from sametoken.io.garbage import exempt_objects


class Node:
    """Of a cycle."""


def test_a_search_sees_new_objects_alone_and_old_garbage_is_gone():
    garbage, kept = Node(), Node()
    garbage.itself, kept.itself = garbage, kept
    gone = weakref.ref(garbage)
    del garbage
    many = [[] for _ in range(100_000)]
    exempt_objects()
    assert gone() is None
    assert len(gc.get_objects()) < len(many)
    later = Node()
    later.itself = later
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None
    assert kept.itself is kept

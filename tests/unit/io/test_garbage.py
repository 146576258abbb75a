"""Objects that no later search for garbage looks at."""

from __future__ import annotations

import gc
import weakref

import pytest

from sametoken.io.garbage import exempt_objects, objects_exempt


class Node:
    """Of a cycle."""


@pytest.fixture(autouse=True)
def thresholds():
    """Those of the suite, afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def thawed():
    """The suite leaves out what was imported (tests/conftest.py), which takes long to search."""
    gc.unfreeze()
    yield
    gc.freeze()


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
    assert gc.get_threshold()[0] > 5_000


@pytest.mark.usefixtures("thawed")
def test_a_block_leaves_out_what_was_there_and_gives_it_back():
    garbage = Node()
    garbage.itself = garbage
    gone = weakref.ref(garbage)
    with objects_exempt():
        del garbage
        gc.collect()
        assert gone() is not None
        with objects_exempt():
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.collect()
    assert gone() is None


def test_what_the_caller_has_left_out_stays_so():
    exempt_objects()
    with objects_exempt():
        pass
    assert gc.get_freeze_count()

"""A sleep gives memory back, and nothing runs before what was lost has come back."""

from __future__ import annotations

import pytest
import torch

from sametoken.engine.sleep import FixedMemory, HostMemory, Sleep
from sametoken.errors import InvariantError, RequestError, UnsupportedError


class Noted:
    """Memory that notes what is given back."""

    def __init__(self) -> None:
        self.dropped: list[bool] = []
        self.refuses = False

    def require_droppable(self) -> None:
        pass

    def drop(self, *, weights: bool) -> None:
        self.dropped.append(weights)
        if self.refuses:
            raise UnsupportedError("the system keeps these pages")


def test_levels_and_tags():
    memory = Noted()
    sleep = Sleep(memory)
    sleep.require_awake()
    sleep.begin(1)
    with pytest.raises(InvariantError):
        sleep.require_awake()
    sleep.end(["weights"])
    assert sleep.asleep == {"kv_cache"}
    sleep.end(["kv_cache"])
    sleep.require_awake()
    sleep.begin(2)
    for tags in (None, ["weights", "kv_cache"]):
        with pytest.raises(RequestError, match="update the weights"):
            sleep.end(tags)
    sleep.end(["weights"])
    with pytest.raises(RequestError, match="update the weights"):
        sleep.end(["kv_cache"])
    sleep.begin(1)
    assert sleep.lacks_weights, "a lighter sleep brings no weights back"
    sleep.lacks_weights = False
    sleep.end(None)
    assert memory.dropped == [False, True, False]


@pytest.mark.parametrize("level", [0, 3, "1", None])
def test_there_are_two_levels(level):
    sleep = Sleep(memory := Noted())
    with pytest.raises(RequestError, match="level"):
        sleep.begin(level)
    with pytest.raises(RequestError, match="no part"):
        sleep.end(["model"])
    assert (memory.dropped, sleep.asleep) == ([], set())


def test_what_was_dropped_in_part_is_lost():
    sleep = Sleep(memory := Noted())
    memory.refuses = True
    with pytest.raises(UnsupportedError):
        sleep.begin(2)
    assert (sleep.asleep, sleep.lacks_weights) == ({"weights", "kv_cache"}, True)


def test_memory_that_stays_is_refused():
    sleep = Sleep(FixedMemory("a GPU"))
    with pytest.raises(UnsupportedError, match="a GPU"):
        sleep.begin(1)
    assert not sleep.asleep


def test_host_memory_is_given_back_at_its_address():
    kv, weights = torch.ones(2**20), torch.ones(2**20)
    strided = torch.ones(2**12, 2**9).t()
    before = [one.data_ptr() for one in (kv, weights)]
    memory = HostMemory((kv, strided), (weights,))
    memory.drop(weights=False)
    assert kv[2**11 : -(2**11)].eq(0).all()
    assert weights.eq(1).all()
    assert strided.eq(1).all()
    memory.drop(weights=True)
    assert weights[2**11 : -(2**11)].eq(0).all()
    weights.fill_(3)
    assert weights.eq(3).all()
    assert [one.data_ptr() for one in (kv, weights)] == before

"""One thread at a time calls an engine."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sametoken.engine.exclusive import Exclusive
from sametoken.errors import EngineDeadError, RequestError


def nothing() -> None:
    """Nobody interrupts a wait."""


def test_one_thread_at_a_time():
    exclusive, inside, most = Exclusive(), [], []

    def work(_):
        for _ in range(50):
            with exclusive.held(nothing):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert set(most) == {1}
    assert len(most) == 200


def test_who_waits_comes_before_the_last_holder():
    exclusive, order, waits = Exclusive(), [], threading.Event()

    def other():
        waits.set()
        with exclusive.held(nothing):
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with exclusive.held(nothing):
            future = pool.submit(other)
            assert waits.wait(60)
            while not exclusive._next.locked():
                pass
        with exclusive.held(nothing):
            order.append("again")
        future.result(60)
    assert order == ["other", "again"]


def test_a_wait_may_be_given_up():
    exclusive = Exclusive()

    def give_up():
        raise KeyboardInterrupt

    def wait():
        with exclusive.held(give_up):
            raise AssertionError("held twice")

    with ThreadPoolExecutor(1) as pool, exclusive.held(nothing):
        assert isinstance(pool.submit(wait).exception(60), KeyboardInterrupt)
    with exclusive.held(nothing):
        pass


def test_work_for_later_is_done_at_once_or_when_the_holder_lets_go():
    exclusive, done = Exclusive(), []
    exclusive.later(lambda: done.append("free"))
    assert done == ["free"]
    with exclusive.held(nothing):
        exclusive.later(lambda: exclusive.later(lambda: done.append("second")))
        exclusive.later(lambda: done.append("third"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(exclusive.later, lambda: done.append("other thread")).result(60)
        assert done == ["free"]
    assert done == ["free", "third", "other thread", "second"]


def test_work_for_later_goes_before_the_next_turn():
    exclusive, done = Exclusive(), []
    exclusive._later.append(lambda: done.append("left over"))
    with exclusive.held(nothing):
        assert done == ["left over"]


def test_a_thread_cannot_hold_it_twice():
    exclusive = Exclusive()
    with (
        exclusive.held(nothing),
        pytest.raises(RequestError, match="in the midst of its step"),
        exclusive.held(nothing),
    ):
        pass
    refused = []

    def work():
        try:
            with exclusive.held(nothing):
                pass
        except RequestError as error:
            refused.append(error)

    exclusive.later(work)
    assert len(refused) == 1
    with exclusive.held(nothing):
        pass


def test_an_error_of_the_holder_lets_the_next_one_in():
    exclusive = Exclusive()
    with pytest.raises(ZeroDivisionError), exclusive.held(nothing):
        1 // 0  # noqa: B018
    with exclusive.held(nothing):
        pass


def test_a_fork_holds_nothing(monkeypatch):
    exclusive, done = Exclusive(), []
    monkeypatch.setattr(os, "getpid", lambda: -1)
    exclusive.later(lambda: done.append(1))
    with pytest.raises(EngineDeadError, match="process -1 is its fork"), exclusive.held(nothing):
        pass
    assert done == []

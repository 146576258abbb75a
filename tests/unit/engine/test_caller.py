"""Callers of an engine: one thread at a time, and interrupts that wait."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sametoken.engine.caller import DeferredInterrupts, Exclusive
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


@pytest.fixture(autouse=True)
def former():
    """Handlers as a program has them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def work():
        with DeferredInterrupts(done.append):
            press(3)
            done.append("work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_an_interrupt_waits_for_a_check_and_is_raised_once():
    with DeferredInterrupts(print) as interrupts:
        interrupts.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()


def test_the_second_one_cuts_what_may_be_cut_and_that_is_told_first():
    told, done = [], []

    def work():
        press()
        done.append("first")
        press()
        done.append("second")

    with pytest.raises(KeyboardInterrupt), DeferredInterrupts(told.append) as interrupts:
        interrupts.cuttable(work)
    assert (done, [type(error) for error in told]) == (["first"], [KeyboardInterrupt])


def test_an_interrupt_goes_before_the_block_s_own_error():
    def work():
        with DeferredInterrupts(print):
            press()
            raise ValueError("own")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_is_called_at_once():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    with DeferredInterrupts(print):
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]


def test_a_handler_that_is_set_within_the_block_stays():
    def mine(number, frame):
        pass

    with DeferredInterrupts(print):
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_blocks_nest():
    with DeferredInterrupts(print) as outer:
        with DeferredInterrupts(print) as inner:
            press()
            inner.check()
        with pytest.raises(KeyboardInterrupt):
            outer.check()


def test_other_threads_have_nothing_to_defer():
    found = []

    def work():
        with DeferredInterrupts(print) as interrupts:
            found.append(signal.getsignal(signal.SIGINT))
            interrupts.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_an_interpreter_without_signals_has_nothing_to_defer(monkeypatch):
    def refuse(number, handler):
        raise ValueError("signal only works in main thread of the main interpreter")

    with monkeypatch.context() as patch:
        patch.setattr("sametoken.engine.caller.signal.signal", refuse)
        with DeferredInterrupts(print) as interrupts:
            interrupts.check()

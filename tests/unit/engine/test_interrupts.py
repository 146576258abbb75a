"""Interrupts wait for the end of a block."""

from __future__ import annotations

import signal
import threading

import pytest

from sametoken.engine.interrupts import DeferredInterrupts


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
        patch.setattr("sametoken.engine.interrupts.signal.signal", refuse)
        with DeferredInterrupts(print) as interrupts:
            interrupts.check()

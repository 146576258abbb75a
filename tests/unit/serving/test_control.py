"""Commands of the engine process: pauses, and weights that a thread reads."""

from __future__ import annotations

import queue
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sametoken.engine.live_adapters import NoLiveAdapters
from sametoken.engine.weights import NewWeights
from sametoken.errors import RequestError, UnsupportedError, WeightUpdateError
from sametoken.serving.control import Control
from sametoken.serving.messages import (
    Answer,
    ChangeWeights,
    FallAsleep,
    ForgetPrefixes,
    Order,
    Pause,
    Resume,
    WakeUp,
    Withdraw,
)
from sametoken.serving.weight_updates import Done


class Engine:
    """Has work, and weights that are loaded from anywhere but from "bad"."""

    has_unfinished = True
    is_sleeping = False
    refuses_sleep = False

    def sleep(self, level: int) -> None:
        if self.refuses_sleep:
            raise RequestError(f"there is no sleep of level {level}")
        self.is_sleeping = True

    def wake_up(self, tags) -> None:
        self.is_sleeping = tags is not None

    def __init__(self) -> None:
        self.upkeep, self.adapters = self, NoLiveAdapters()
        self.scheduler = SimpleNamespace(num_running=1, num_swapped=0, admits=True)
        self.weights = SimpleNamespace(load=self.load)
        self.resolved = SimpleNamespace(device=torch.device("cpu"))
        self.dropped: list[str] = []

    def load(self, source, target: str) -> NewWeights:
        if target == "broken":
            raise ZeroDivisionError("a defect")
        if target == "bad":
            raise UnsupportedError("weights do not change")
        return NewWeights(SimpleNamespace(drop=lambda: self.dropped.append(target)), of_target=True)

    def use_weights(self, new: NewWeights, version: int | None) -> int:
        if version == 0:
            raise WeightUpdateError("version=0 does not follow")
        return version or 1


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr("sametoken.serving.weight_updates.source_of", lambda path: path)
    engine, inbox, answers = Engine(), queue.SimpleQueue(), []
    return engine, Control(engine, inbox.put, answers.append), inbox, answers


def test_a_pause_stops_at_once_or_after_the_running_requests(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, Pause(wait=False)))
    assert (control.may_step, answers) == (False, [Answer(1, paused=True)])
    control.handle(Order(2, Pause(wait=True)))
    assert control.may_step
    assert not engine.scheduler.admits
    control.note_step()
    assert answers == [Answer(1, paused=True)]
    engine.scheduler.num_running, engine.scheduler.num_swapped = 0, 1
    control.note_step()
    assert control.may_step
    engine.scheduler.num_swapped = 0
    control.note_step()
    assert (control.may_step, answers) == (False, [Answer(1, paused=True), Answer(2, paused=True)])
    control.handle(Order(3, Resume()))
    assert control.may_step
    assert engine.scheduler.admits
    assert answers[2:] == [Answer(3)]


def test_no_pause_is_left_without_an_answer(scene):
    _, control, _, answers = scene
    control.handle(Order(1, Pause(wait=True)))
    control.handle(Order(2, Pause(wait=True)))
    control.handle(Order(3, Resume()))
    assert answers == [Answer(1, paused=True), Answer(2, paused=True), Answer(3)]
    assert control.may_step


@pytest.mark.parametrize(
    ("target", "version", "expected"),
    [
        ("model", None, Answer(7, 1)),
        ("model", 5, Answer(7, 5)),
        ("model", 0, WeightUpdateError),
        ("bad", None, UnsupportedError),
        ("broken", None, WeightUpdateError),
    ],
)
def test_weights_are_loaded_by_a_thread_and_used_in_the_loop(scene, target, version, expected):
    engine, control, inbox, answers = scene
    control.handle(Order(7, ChangeWeights("anywhere", version, target)))
    loaded = inbox.get(timeout=10)
    assert isinstance(loaded, Done)
    assert answers == []
    control.handle(loaded)
    (answer,) = answers
    assert answer == expected if isinstance(expected, Answer) else type(answer.error) is expected
    assert engine.dropped == (["model"] if version == 0 else [])


def test_prefixes_are_forgotten_without_a_pause(scene, monkeypatch):
    engine, control, _, answers = scene
    forgotten = []
    monkeypatch.setattr(engine, "forget_prefixes", lambda: forgotten.append(1), raising=False)
    control.handle(Order(1, ForgetPrefixes()))
    assert (forgotten, answers, control.may_step) == ([1], [Answer(1)], True)


def test_a_sleep_pauses_first_and_its_end_resumes(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, FallAsleep(1, wait=True)))
    assert control.may_step
    assert not engine.scheduler.admits
    engine.scheduler.num_running = 0
    control.note_step()
    control.handle(Order(2, Resume()))
    assert answers[0] == Answer(1, paused=True, sleeps=True)
    assert isinstance(answers[1].error, RequestError)
    assert not control.may_step
    control.handle(Order(3, WakeUp(("weights",))))
    assert answers[2] == Answer(3, paused=True, sleeps=True)
    control.handle(Order(4, WakeUp(None)))
    assert answers[3] == Answer(4)
    assert control.may_step
    engine.has_unfinished = False
    assert not control.may_step


def test_a_refused_sleep_ends_its_own_pause_and_no_other(scene):
    engine, control, _, answers = scene
    engine.refuses_sleep = True
    control.handle(Order(1, FallAsleep(3, wait=False)))
    assert isinstance(answers[0].error, RequestError)
    assert not answers[0].paused
    assert control.may_step
    assert engine.scheduler.admits
    control.handle(Order(2, Pause(wait=False)))
    control.handle(Order(3, FallAsleep(3, wait=False)))
    assert answers[2].paused
    assert not control.may_step


def test_a_sleep_that_waits_for_requests_is_not_resumed_by_what_comes_with_their_end(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, FallAsleep(1, wait=True)))
    engine.scheduler.num_running = 0
    control.handle(Order(2, Resume()))
    assert isinstance(answers[1].error, RequestError)
    assert not control.may_step


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("command", [Pause, partial(FallAsleep, 1)])
def test_a_pause_that_is_withdrawn_has_not_been(scene, command, wait):
    engine, control, _, answers = scene
    engine.refuses_sleep = True
    control.handle(Order(1, command(wait=wait)))
    control.handle(Withdraw(1))
    assert answers[-1] == Answer(1)
    assert control.may_step
    assert engine.scheduler.admits
    engine.scheduler.num_running = 0
    control.note_step()
    assert control.may_step


@pytest.mark.parametrize("wait", [True, False])
def test_other_pauses_hold_where_one_is_withdrawn(scene, wait):
    engine, control, _, answers = scene
    control.handle(Order(1, Pause(wait=False)))
    control.handle(Order(2, Pause(wait=wait)))
    control.handle(Withdraw(2))
    assert answers[-1] == Answer(2, paused=True)
    assert not control.may_step
    assert not engine.scheduler.admits
    control.handle(Withdraw(1))
    assert control.may_step
    assert engine.scheduler.admits


def test_a_pause_goes_on_waiting_where_another_is_withdrawn(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, Pause(wait=False)))
    control.handle(Order(2, Pause(wait=True)))
    control.handle(Withdraw(1))
    assert control.may_step
    assert not engine.scheduler.admits
    engine.scheduler.num_running = 0
    control.note_step()
    assert answers == [Answer(1, paused=True), Answer(1), Answer(2, paused=True)]


def test_an_engine_that_sleeps_is_not_woken_by_a_withdrawal(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, FallAsleep(2, wait=False)))
    control.handle(Withdraw(1))
    assert answers[-1] == Answer(1, paused=True, sleeps=True)
    assert not control.may_step
    control.handle(Order(2, WakeUp(None)))
    assert control.may_step
    assert engine.scheduler.admits


def test_weights_that_are_withdrawn_are_dropped(scene):
    engine, control, inbox, answers = scene
    dropped = []
    replacement = SimpleNamespace(drop=lambda: dropped.append(True))
    engine.weights.load = lambda *given: NewWeights(replacement, of_target=True)
    control.handle(Order(7, ChangeWeights("anywhere", 5, "model")))
    control.handle(Withdraw(7))
    control.handle(inbox.get(timeout=10))
    assert dropped == [True]
    assert answers == [Answer(7), Answer(7)]
    control.handle(Order(8, ChangeWeights("anywhere", 5, "model")))
    control.handle(inbox.get(timeout=10))
    assert answers[2] == Answer(8, 5)

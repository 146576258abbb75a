"""Commands of the engine process: pauses, and weights that a thread reads."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
import torch

from sametoken.engine.weights import NewWeights
from sametoken.errors import RequestError, UnsupportedError, WeightUpdateError
from sametoken.serving.control import Control
from sametoken.serving.messages import (
    Answer,
    ChangeWeights,
    FallAsleep,
    Order,
    Pause,
    Resume,
    WakeUp,
)
from sametoken.serving.weight_updates import Done


class Engine:
    """Has work, and weights that are loaded from anywhere but from "bad"."""

    has_unfinished = True
    is_sleeping = False

    def sleep(self, level: int) -> None:
        self.is_sleeping = True

    def wake_up(self, tags) -> None:
        self.is_sleeping = tags is not None

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(num_running=1, num_swapped=0, admits=True)
        self.weights = SimpleNamespace(load=self.load)
        self.resolved = SimpleNamespace(device=torch.device("cpu"))

    def load(self, source, target: str) -> NewWeights:
        if target == "broken":
            raise ZeroDivisionError("a defect")
        if target == "bad":
            raise UnsupportedError("weights do not change")
        return NewWeights(None, target == "model")

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
    _, control, inbox, answers = scene
    control.handle(Order(7, ChangeWeights("anywhere", version, target)))
    loaded = inbox.get(timeout=10)
    assert isinstance(loaded, Done)
    assert answers == []
    control.handle(loaded)
    (answer,) = answers
    assert answer == expected if isinstance(expected, Answer) else type(answer.error) is expected


def test_a_sleep_needs_a_pause_and_ends_it(scene):
    engine, control, _, answers = scene
    control.handle(Order(1, FallAsleep(1)))
    assert isinstance(answers.pop().error, RequestError)
    control.handle(Order(2, Pause(wait=False)))
    control.handle(Order(3, FallAsleep(1)))
    control.handle(Order(4, Resume()))
    assert answers[:2] == [Answer(2, paused=True), Answer(3, paused=True, sleeps=True)]
    assert isinstance(answers[2].error, RequestError)
    assert not control.may_step
    control.handle(Order(5, WakeUp(("weights",))))
    assert answers[3] == Answer(5, paused=True, sleeps=True)
    control.handle(Order(6, WakeUp(None)))
    assert answers[4] == Answer(6)
    assert control.may_step
    engine.has_unfinished = False
    assert not control.may_step

"""The loop: schedule, steps that fit a time, checkpoints."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.clock import Clock
from helpers.limits import files_up_to
from sametoken.errors import CheckpointError, ConfigError, NumericalError
from sametoken.train import loop
from sametoken.train.acceptance import Acceptance
from sametoken.train.loop import CHECKPOINT, learning_rate, run_loop
from sametoken.train.options import LoopOptions
from sametoken.train.progress import StepLoss


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.bias = nn.Parameter(torch.zeros(3))


class Fit:
    """Least squares; a step's data follow from the step. On a clock it takes a second."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.network = Line()
        self.seen: list[int] = []
        self.clock = clock or Clock()

    def loss(self, step: int) -> StepLoss:
        self.seen.append(step)
        self.clock.now += 1
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
        y = x @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]])
        error = x @ self.network.weight.T + self.network.bias - y
        return StepLoss(error.square().mean(), Acceptance.none(2, torch.device("cpu")))


class Broken(Fit):
    def loss(self, step: int) -> StepLoss:
        found = super().loss(step)
        return StepLoss(found.loss * (float("nan") if step == 12 else 1), found.acceptance)


class TooLarge(Fit):
    def loss(self, step: int) -> StepLoss:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def options(**changes) -> LoopOptions:
    return LoopOptions(**{"steps": 40, "warmup_steps": 5, "learning_rate": 0.1} | changes)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


def train(objective, output, chosen, report=lambda now: None, identity=None):
    output.mkdir(exist_ok=True)
    return run_loop(objective, chosen, output, report, identity=identity or {}, began=0.0)


def test_it_learns_and_reports(tmp_path):
    reports = []
    fit = Fit()
    last = train(fit, tmp_path, options(steps=200), reports.append)
    assert fit.seen == list(range(200))
    assert [now.step for now in reports] == list(range(10, 201, 10))
    assert reports[-1].loss < 0.01 * reports[0].loss
    assert last == reports[-1]


def test_the_rate_rises_then_falls_as_a_cosine():
    chosen = options()
    rates = [learning_rate(step, 40, chosen) for step in range(40)]
    assert rates[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert rates[5] == 0.1
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert learning_rate(40, 40, chosen) == pytest.approx(0.0)
    half = 5 + 35 / 2
    assert learning_rate(int(half), 40, chosen) == pytest.approx(0.05, abs=0.005)


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path):
    whole = Fit()
    train(whole, tmp_path / "a", options())

    class Stop(Exception):
        pass

    def stop_at_20(now):
        if now.step == 20:
            raise Stop

    cut = Fit()
    with pytest.raises(Stop):
        train(cut, tmp_path / "b", options(checkpoint_every=15), stop_at_20)
    resumed = Fit()
    train(resumed, tmp_path / "b", options(checkpoint_every=15, resume=True))
    assert resumed.seen == list(range(15, 40))
    for name, value in whole.network.state_dict().items():
        assert torch.equal(resumed.network.state_dict()[name], value), name


@pytest.mark.parametrize("every", [5, 7])
def test_reports_of_a_resumed_training_are_those_without_the_break(tmp_path, every):
    """A report's means are of all steps since the one before, those before the break too."""
    whole, resumed = [], []
    train(Fit(), tmp_path / "a", options(steps=17), whole.append)
    output = tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(2), output, options(steps=17, checkpoint_every=every))
    train(Fit(), output, options(steps=17, resume=True), resumed.append)
    assert [replace(now, seconds=0.0) for now in resumed] == [
        replace(now, seconds=0.0) for now in whole
    ]


class Interrupted(Fit):
    """Ctrl-C, some times over, in the midst of step 7."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def loss(self, step: int) -> StepLoss:
        for _ in range(self.times if step == 7 else 0):
            signal.raise_signal(signal.SIGINT)
        return super().loss(step)


def test_an_interrupt_leaves_a_checkpoint_to_go_on_from(tmp_path):
    whole, resumed = Fit(), Fit()
    train(whole, tmp_path / "a", options())
    output = tmp_path / "b"
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(1), output, options())
    train(resumed, output, options(resume=True))
    assert resumed.seen == list(range(8, 40))
    for name, value in whole.network.state_dict().items():
        assert torch.equal(resumed.network.state_dict()[name], value), name


def test_a_step_that_a_second_interrupt_cuts_is_in_no_checkpoint(tmp_path):
    chosen = options(checkpoint_every=5)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(2), tmp_path, chosen)
    resumed = Fit()
    train(resumed, tmp_path, replace(chosen, resume=True))
    assert resumed.seen == list(range(5, 40))


def test_a_whole_training_that_is_resumed_keeps_its_last_report(tmp_path):
    output = tmp_path / "a"
    first = train(Fit(), output, options())
    again = Fit()
    resumed = train(again, output, options(resume=True))
    assert not again.seen
    assert resumed == first
    assert resumed.loss > 0


@pytest.mark.parametrize(
    ("changes", "identity", "says"),
    [
        ({"learning_rate": 0.2}, {}, "learning_rate"),
        ({"seed": 1}, {}, "seed"),
        ({"steps": 50}, {}, "steps"),
        ({}, {"text": "another"}, "text"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, changes, identity, says):
    train(Fit(), tmp_path, options(), identity={"text": "one"})
    with pytest.raises(ConfigError, match=says):
        train(Fit(), tmp_path, options(resume=True, **changes), identity={"text": "one"} | identity)


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(Fit(), tmp_path, options(resume=True))


def test_a_checkpoint_that_does_not_fit_the_memory_is_not_called_broken(tmp_path, monkeypatch):
    train(Fit(), tmp_path, options())

    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(ConfigError, match=r"the training does not fit the memory \(MemoryError\)"):
        train(Fit(), tmp_path, options(resume=True))


def test_steps_are_chosen_to_fit_the_time_and_repeat_under_that_number(tmp_path, clock):
    timed, again = Fit(clock), Fit()
    last = train(timed, tmp_path / "a", options(steps=100_000, max_seconds=100.0))
    # 94 % of the time is planned.
    assert last.steps == last.step == 94
    train(again, tmp_path / "b", options(steps=last.steps))
    assert torch.equal(again.network.weight, timed.network.weight)


def test_steps_are_planned_after_the_shortest_warm_up_too(tmp_path, clock):
    last = train(Fit(clock), tmp_path, options(steps=1000, warmup_steps=1, max_seconds=100.0))
    assert last.steps == last.step == 94


@pytest.mark.parametrize("warmup_steps", [9, 12, 16])
def test_steps_are_planned_after_a_break_in_the_second_half_of_warm_up(
    tmp_path, clock, warmup_steps
):
    chosen = options(steps=1000, warmup_steps=warmup_steps, max_seconds=100.0)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(1), tmp_path, chosen)
    # The time counts from the resumed training's beginning, which step 9 is the first of.
    last = train(Fit(clock), tmp_path, replace(chosen, resume=True))
    assert last.steps == last.step == 8 + 94


def test_no_step_is_begun_after_the_time(tmp_path, clock):
    slow = Fit(clock)
    last = train(slow, tmp_path, options(warmup_steps=1000, steps=1000, max_seconds=4.5))
    assert last.step == len(slow.seen) == 5
    assert (tmp_path / CHECKPOINT).is_file()


def test_weights_that_are_no_numbers_replace_no_checkpoint(tmp_path):
    with pytest.raises(NumericalError, match="weights are not finite by step 15"):
        train(Broken(), tmp_path, options(checkpoint_every=5))
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 10


def test_a_loss_that_is_no_number_ends_training(tmp_path):
    with pytest.raises(NumericalError, match="the loss is nan"):
        train(Broken(), tmp_path, options())


def test_a_step_that_does_not_fit_the_device_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"batch_tokens=7 .* \(CUDA out of memory\)\. Lower"):
        train(TooLarge(), tmp_path, options(batch_tokens=7))


@pytest.mark.parametrize(("every", "copies"), [(0, 1), (41, 1), (40, 2)])
def test_a_disk_without_room_for_checkpoints_is_refused_before_the_first_step(
    tmp_path, monkeypatch, every, copies
):
    """One that takes another's place is whole before that goes."""
    fit, chosen = Fit(), options(checkpoint_every=every)
    # Six weights and three biases in fp32, and two moments of each.
    needed = copies * 3 * 4 * (6 + 3)
    usage = shutil.disk_usage(tmp_path)
    for free, steps in ((needed - 1, 0), (needed, 40)):
        found = usage._replace(free=free)
        monkeypatch.setattr(loop.shutil, "disk_usage", lambda path, found=found: found)
        if steps:
            train(fit, tmp_path, chosen)
        else:
            with pytest.raises(ConfigError, match=f"{free} bytes, and a checkpoint.* {needed}"):
                train(fit, tmp_path, chosen)
        assert len(fit.seen) == steps


def test_a_limit_of_files_below_the_checkpoint_is_refused_before_the_first_step(tmp_path):
    fit = Fit()
    with (
        files_up_to(3 * 4 * (6 + 3) - 1),
        pytest.raises(ConfigError, match=r"takes 108 bytes, .* \(file too large"),
    ):
        train(fit, tmp_path, options())
    assert (fit.seen, list(tmp_path.iterdir())) == ([], [])


def test_gradients_are_clipped(tmp_path):
    free, clipped = Fit(), Fit()
    one = options(steps=1, warmup_steps=1)
    train(free, tmp_path / "a", one)
    train(clipped, tmp_path / "b", options(steps=1, warmup_steps=1, clip_norm=1e-12))
    # AdamW divides the scale out except for its epsilon, which a gradient this short meets.
    assert free.network.bias.abs().max() > 10 * clipped.network.bias.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"dtype": "float16"},
        {"learning_rate": 0.0},
        {"validation": 1.0},
        {"weight_decay": -1.0},
        {"max_seconds": 0.0},
        {"max_seconds": float("nan")},
        {"max_seconds": float("inf")},
        {"clip_norm": float("nan")},
        {"learning_rate": float("inf")},
        {"weight_decay": float("nan")},
    ],
)
def test_impossible_options_are_refused(changes):
    with pytest.raises(ConfigError, match="possible"):
        LoopOptions(**changes)

"""The engine's loop: launches run ahead of results, and a failure ends it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.harness import Shape, build, request, run
from helpers.toy import ToyModel
from sametoken.engine.core import EngineCore
from sametoken.engine.upkeep import used_or_dropped
from sametoken.engine.weights import NewWeights
from sametoken.errors import EngineDeadError, InvariantError, RequestError, WeightUpdateError
from sametoken.types.plan import StepPlan


class Scripted:
    """A scheduler and a runner in one, which write down what happens."""

    def __init__(self, num_plans: int) -> None:
        self.log: list[str] = []
        self.plans = [StepPlan(i) for i in range(num_plans)]
        self.fail_at: str | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.plans)

    def _note(self, event: str):
        self.log.append(event)
        if event == self.fail_at:
            raise InvariantError("it was planned to fail")

    def plan(self) -> StepPlan | None:
        return self.plans.pop(0) if self.plans else None

    def submit(self, plan: StepPlan):
        self._note(f"launch {plan.step_id}")
        return SimpleNamespace(wait=lambda: plan.step_id)

    def process_output(self, step_id: int) -> tuple:
        self._note(f"process {step_id}")
        return (step_id,)

    def add(self, item) -> None:
        self._note(f"add {item}")

    def release(self, request_id: str, num_kept_tokens: int | None) -> None:
        self._note(f"release {request_id} {num_kept_tokens}")


def core_over(scripted: Scripted, steps_in_flight: int) -> EngineCore:
    return EngineCore(SimpleNamespace(steps_in_flight=steps_in_flight), scripted, scripted)


def drive(core: EngineCore) -> list[tuple]:
    results = []
    while core.has_unfinished:
        results.append(core.step())
    return results


def test_one_step_in_flight_settles_what_it_launches():
    scripted = Scripted(3)
    assert drive(core_over(scripted, 1)) == [(0,), (1,), (2,)]
    assert scripted.log == [f"{verb} {i}" for i in range(3) for verb in ("launch", "process")]


@pytest.mark.parametrize("depth", [2, 3])
def test_launches_run_ahead_and_results_come_in_order(depth):
    scripted = Scripted(5)
    results = drive(core_over(scripted, depth))
    assert results == [()] * (depth - 1) + [(i,) for i in range(5)]
    ahead = [f"launch {i}" for i in range(depth)]
    assert scripted.log[: depth + 1] == [*ahead, "process 0"]
    processed = [event for event in scripted.log if event.startswith("process")]
    assert processed == [f"process {i}" for i in range(5)]
    in_flight = 0
    for event in scripted.log:
        in_flight += 1 if event.startswith("launch") else -1
        assert 0 <= in_flight <= depth
    assert in_flight == 0


def test_a_step_with_nothing_to_launch_settles_at_once():
    scripted = Scripted(1)
    assert drive(core_over(scripted, 3)) == [(), (0,)]


def test_a_step_with_nothing_to_do_does_nothing():
    scripted = Scripted(0)
    core = core_over(scripted, 2)
    assert not core.has_unfinished
    assert core.step() == ()
    assert scripted.log == []


def test_a_step_tells_whose_first_it_is():
    scripted, begun = Scripted(2), []
    scripted.plans[0] = StepPlan(0, admissions=tuple(SimpleNamespace(request_id=c) for c in "ab"))
    core = core_over(scripted, 1)
    for _ in range(3):
        core.step()
        begun.append(core.begun)
    assert begun == [("a", "b"), (), ()]


@pytest.mark.parametrize("event", ["launch 1", "process 0"])
def test_a_failure_ends_the_engine(event):
    scripted = Scripted(4)
    scripted.fail_at = event
    core = core_over(scripted, 2)
    core.step()
    with pytest.raises(EngineDeadError, match=r"a step failed: .*planned to fail") as caught:
        core.step()
    assert isinstance(caught.value.__cause__, InvariantError)
    so_far = list(scripted.log)
    for call in (
        core.step,
        lambda: core.add_request("x"),
        core.upkeep.wake_up,
        core.upkeep.forget_prefixes,
        lambda: core.upkeep.use_weights(NewWeights.same()),
    ):
        with pytest.raises(EngineDeadError, match="the engine stopped after") as caught:
            call()
        assert caught.value.remedy == "restart the engine"
    assert scripted.log == so_far
    core.release("x", 5)
    assert scripted.log == so_far


def test_an_engine_that_is_stopped_says_after_what():
    scripted = Scripted(2)
    core = core_over(scripted, 1)
    core.stop(KeyboardInterrupt())
    core.stop(ValueError("later"))
    for call in (core.step, lambda: core.add_request("x")):
        with pytest.raises(EngineDeadError, match=r"KeyboardInterrupt\(\) cut a step short"):
            call()
    core.release("x")
    assert scripted.log == []


def test_a_refused_request_is_the_caller_s_error_alone():
    core = build(ToyModel(), Shape())
    core.add_request(request("a", (1, 2)))
    for bad, cause in (
        (request("a", (3,)), "already exists"),
        (request("b", ()), "empty prompt"),
        (request("c", (1,) * 96), "leaves room for 95"),
        (request("d", (1,), max_tokens=96), "max_total_tokens=97"),
    ):
        with pytest.raises(RequestError, match=cause):
            core.add_request(bad)
    core.release("a")
    ran = run(core, [request("a", (1, 2))])
    assert len(ran.tokens["a"]) == 12


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_a_request_released_in_mid_flight_brings_nothing_more(steps_in_flight):
    core = build(ToyModel(), Shape(steps_in_flight=steps_in_flight))
    core.add_request(request("gone", (1, 2, 3)))
    core.add_request(request("stays", (4, 5)))
    before = [update for _ in range(steps_in_flight) for update in core.step()]
    for request_id in ("gone", "gone", "unknown"):
        core.release(request_id)
    after = []
    while core.has_unfinished:
        after += core.step()
        stayed = [u for u in (*before, *after) if u.request_id == "stays"]
        if len(stayed) == 12:
            core.release("stays")
    assert {update.request_id for update in after} == {"stays"}
    core.scheduler.check_integrity()


def test_a_request_released_after_new_weights_brings_nothing_to_the_next_of_its_id():
    core = build(ToyModel(), Shape(steps_in_flight=2))
    core.add_request(request("x", (1, 2, 3)))
    assert core.step() == ()
    core.upkeep.use_weights(ScriptedWeights([]).load(None, "model"))
    core.release("x", aborted=True)
    following = request("x", (4, 5))
    assert run(core, [following]).tokens == run(build(ToyModel(), Shape()), [following]).tokens


class ScriptedWeights:
    """Weights that write down when they are written."""

    def __init__(self, log: list[str]) -> None:
        self.replacement = SimpleNamespace(
            write=lambda: log.append("write"), drop=lambda: log.append("drop"), pairs=((), ())
        )

    def load(self, source, target: str) -> NewWeights:
        return NewWeights(self.replacement, target == "model")


class Versioned(Scripted):
    weight_version = 0

    def begin_weights(self, version: int) -> None:
        self._note(f"weights {version}")
        self.weight_version = version

    def begin_drafter_weights(self) -> None:
        self._note("drafter weights")


def updatable(num_plans: int, steps_in_flight: int) -> tuple[EngineCore, Versioned]:
    scripted = Versioned(num_plans)
    resolved = SimpleNamespace(steps_in_flight=steps_in_flight)
    weights = ScriptedWeights(scripted.log)
    return EngineCore(resolved, scripted, scripted, weights=weights), scripted


def test_new_weights_are_written_between_steps_and_no_result_is_lost():
    core, scripted = updatable(3, steps_in_flight=3)
    assert [core.step(), core.step()] == [(), ()]
    assert core.upkeep.use_weights(core.weights.load(None, "model")) == 1
    assert scripted.log[2:] == ["process 0", "process 1", "write", "weights 1"]
    assert core.has_unfinished
    assert drive(core) == [(0, 1), (2,)]


def test_a_result_that_new_weights_waited_for_is_work_left():
    core, scripted = updatable(1, steps_in_flight=2)
    core.step()
    core.upkeep.use_weights(core.weights.load(None, "model"), 5)
    assert scripted.plans == []
    assert core.has_unfinished
    assert drive(core) == [(0,)]
    assert core.scheduler.weight_version == 5


def test_versions_grow_and_are_the_target_s():
    core, scripted = updatable(0, steps_in_flight=1)
    new, drafter = (core.weights.load(None, target) for target in ("model", "drafter"))
    core.upkeep.use_weights(new, 3)
    for weights, version in ((new, 3), (new, 2), (new, 4.0), (new, 2**63), (drafter, 4)):
        with pytest.raises(WeightUpdateError), used_or_dropped(weights):
            core.upkeep.use_weights(weights, version)
    with used_or_dropped(drafter):
        assert core.upkeep.use_weights(drafter) == 3
    assert scripted.log == ["write", "weights 3", *["drop"] * 5, "write", "drafter weights"]


def test_a_step_that_fails_before_new_weights_ends_the_engine():
    core, scripted = updatable(2, steps_in_flight=2)
    core.step()
    scripted.fail_at = "process 0"
    with pytest.raises(EngineDeadError):
        core.upkeep.use_weights(core.weights.load(None, "model"))
    assert "write" not in scripted.log

"""Which rows of a plan go to the graphs, and which to the eager verbs."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sametoken.core.plan import Admission, PlanRow, StepPlan
from sametoken.core.sampling_params import SamplingParams
from sametoken.runner.async_output import OutputRing
from sametoken.runner.between import LogitsProcessing
from sametoken.runner.graphed import GraphedRunner
from sametoken.runner.graphs import StepGraphs
from sametoken.runner.padded import PaddedStep
from sametoken.runner.stream import ImmediateStream

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=20, top_p=0.95, seed=0),
    SamplingParams(min_p=0.1, seed=0),
    SamplingParams(top_p=0.9, presence_penalty=0.5, seed=0),
)
GRAMMARS = (None, None, None, object())
ADMISSIONS = tuple(
    Admission(slot, (1, 2), 0, params, grammar=grammar)
    for slot, (params, grammar) in enumerate(zip(PARAMS, GRAMMARS, strict=True))
)
ROWS = tuple(PlanRow(slot, 1, 0, True) for slot in range(4))
ALONE, ONE_OF_TWO = (SimpleNamespace(rank=0, size=size) for size in (1, 2))


class Graphs(StepGraphs):
    """Notes the slots that are run, and replays nothing."""

    def run_windows(self, rows, between):
        self.step.sequences.append([row[0] for row in rows])
        for _slot, _limit, _live, step_id, place in rows:
            self.verdicts[place] = torch.tensor([step_id, 0, 0, 0, 0])


class Eager:
    """The parts of a ``StepRunner`` that the split needs; notes the slots that are run."""

    def __init__(self, ran) -> None:
        self.ran, self.stream = ran, ImmediateStream()
        self.ring = OutputRing.allocate(2, 4, 0)

    def take_up(self, plan) -> None:
        pass

    def run_rows(self, plan, buffer, first) -> None:
        slots = [row.slot for row in plan.rows]
        self.ran.append(slots)
        buffer.copy_from(torch.zeros(len(slots), 5, dtype=torch.int64), first)


def slots_run(runner_of, *plans: StepPlan) -> tuple[list, list]:
    """Slots by launch: those of the graphs, and those of the eager verbs."""
    graph_slots, eager_slots = [], []
    step = PaddedStep(graph_slots, None, None, None, None, parallel=runner_of)
    eager = Eager(eager_slots)
    graphs = Graphs(step, (4,), (64,), None, eager.ring.rows)
    runner = GraphedRunner(eager, graphs, LogitsProcessing(None, None, None, None, None))
    for plan in plans:
        runner.submit(plan).wait()
    return graph_slots, eager_slots


def test_requests_of_every_kind_are_served_by_graphs():
    plan = StepPlan(0, admissions=ADMISSIONS, rows=ROWS)
    assert slots_run(ALONE, plan) == ([[0, 1, 2, 3]], [])


def test_of_several_ranks_logits_are_changed_where_they_are_whole():
    plan = StepPlan(0, admissions=ADMISSIONS, rows=ROWS)
    assert slots_run(ONE_OF_TWO, plan) == ([[0]], [[1, 2, 3]])


def test_a_slot_is_served_as_its_newest_request_asks():
    plans = (
        StepPlan(0, admissions=ADMISSIONS, rows=ROWS),
        StepPlan(0, admissions=(Admission(3, (1, 2), 0, PARAMS[0]),), rows=ROWS),
    )
    assert slots_run(ONE_OF_TWO, *plans) == ([[0], [0, 3]], [[1, 2, 3], [1, 2]])

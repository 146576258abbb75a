"""Chosen experts in one buffer: of passes alone, also of replayed ones, read by committed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.forward import OneRun, load
from helpers.nemotron import write_nemotron
from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.backend import Routing
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels
from sametoken.runner.async_output import NUM_COUNTS, HostBuffer
from sametoken.runner.routed_experts import (
    NO_EXPERTS,
    NO_RECORDER,
    ExpertRecorder,
    RecordingKernels,
    StepExperts,
    plain_kernels,
    recorder_of,
    recording,
)
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

ROUTING = Routing(2, normalise=True)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mixture:
    kernels: RecordingKernels
    router: SimpleNamespace
    experts: SimpleNamespace
    routing: Routing


@dataclass(frozen=True)
class Layer:
    mlp: Mixture | None


class Target:
    """Its mixtures are given the logits of their routers; layer 1 has none."""

    config, caches = SimpleNamespace(architecture="Toy"), ()

    def __init__(self, num_experts: int = 7) -> None:
        self.kernels = RecordingKernels(ReferenceKernels())
        router = SimpleNamespace(weight=SimpleNamespace(out_features=num_experts))
        mixture = Mixture(self.kernels, router, SimpleNamespace(nbytes=0), ROUTING)
        self.layers = (Layer(mixture), Layer(None), Layer(mixture))
        self.given: torch.Tensor | None = None
        self.chosen: list[torch.Tensor] = []

    def forward(self, token_ids, rows, cache):
        self.chosen = [self.kernels.moe_gate(one, ROUTING)[0] for one in self.given]


def recorder(target: Target) -> ExpertRecorder:
    return ExpertRecorder(target, target.kernels, 8, CPU)


def run(recorder: ExpertRecorder, target: Target, num_rows: int) -> None:
    rows = SimpleNamespace(slots=torch.zeros(num_rows))
    recorder.over(target).forward(rows.slots, rows, None)


def plan_of(*sizes: int) -> StepPlan:
    """Prompts of these sizes."""
    return StepPlan(0, requests=tuple(ScheduledRequest(i, n, 0, True) for i, n in enumerate(sizes)))


def kept(recorder: ExpertRecorder, plan: StepPlan) -> StepExperts:
    return recorder.keep(plan, StepLayout.of(plan))


def test_slices_of_a_layer_follow_each_other_and_a_drafter_s_choices_are_elsewhere():
    plain, kernels = ReferenceKernels(), RecordingKernels(ReferenceKernels())
    layers, memory = torch.randn(2, 5, 7), torch.full((2, 5, 2), -1)
    expected = torch.stack([plain.moe_gate(one, ROUTING)[0] for one in layers])
    with kernels.recorded([*memory]):
        for one in layers:
            for rows in (one[:3], one[3:]):
                kernels.moe_gate(rows, ROUTING)
    others, _ = kernels.moe_gate(torch.randn(9, 7), Routing(3, normalise=True))
    assert others.shape == (9, 3)
    assert torch.equal(memory, expected)
    assert kernels.name == plain.name
    assert plain_kernels(kernels) is kernels.plain
    assert plain_kernels(plain) is plain


@pytest.mark.parametrize(("num_calls", "message"), [(1, "chosen in a pass"), (3, "more rows")])
def test_a_pass_that_chooses_for_other_rows_is_refused(num_calls, message):
    target = Target()
    target.given = torch.randn(num_calls, 5, 7)
    with pytest.raises(InvariantError, match=message):
        run(recorder(target), target, 5)


def test_a_replayed_pass_writes_where_the_captured_one_did():
    """A replay runs no line of Python; it writes to the addresses that were handed out."""
    target = Target()
    experts, plan = recorder(target), plan_of(3, 2)
    target.given = torch.randn(2, 8, 7)
    run(experts, target, 8)
    captured = target.chosen
    # Of a smaller shape, which shares the memory.
    target.given = torch.randn(2, 2, 7)
    run(experts, target, 2)
    first = torch.arange(32).view(2, 8, 2)
    for written, values in zip(captured, first, strict=True):
        written.copy_(values)
    oldest = kept(experts, plan)
    for written in captured:
        written.fill_(99)
    found = np.concatenate([oldest.of(i, one, 0) for i, one in enumerate(plan.requests)])
    assert (found.shape, found.dtype) == ((5, 3, 2), np.uint8)
    assert not found[:, 1].any()
    assert np.array_equal(found[:, [0, 2]], first[:, :5].transpose(0, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, under the interpreter")
def test_triton_kernels_record_what_the_reference_chooses(tmp_path):
    path, found = write_nemotron(tmp_path, pattern="M*E-E", moe_latent_size=6), []
    for kernels in (ReferenceKernels(), TritonKernels(GemmTable())):
        target = load(path, recording(kernels))
        experts, plan = recorder_of(target, 6, CPU), plan_of(6)
        OneRun(experts.over(target)).logits([1, 5, 3, 2, 7, 7], [])
        found.append(kept(experts, plan).of(0, *plan.requests, 0))
    assert np.array_equal(*found)
    assert found[0].shape == (6, 5, 2)
    assert found[0].any(axis=(0, 2)).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(("count", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_ids_of_more_experts_than_a_byte_counts_have_two_bytes(count, dtype):
    target = Target(num_experts=count)
    experts, plan = recorder(target), plan_of(3)
    target.given = torch.eye(count)[-3:].expand(2, 3, count)
    run(experts, target, 3)
    found = kept(experts, plan).of(0, *plan.requests, 0)
    assert found.dtype == dtype
    assert found[:, 0, 0].tolist() == [count - 3, count - 2, count - 1]


def test_what_cannot_be_recorded_is_refused():
    target = Target()
    with pytest.raises(InvariantError, match="a pass of 9 rows where 8"):
        run(recorder(target), target, 9)
    admission = Admission(0, (1, 2, 3), num_cached=2, params=SamplingParams())
    with pytest.raises(InvariantError, match="prefix cache"):
        kept(recorder(target), replace(plan_of(1), admissions=(admission,)))
    target.layers = (Layer(None),)
    with pytest.raises(UnsupportedError, match="Toy has no experts"):
        recorder(target)


def test_a_target_of_plain_kernels_is_not_recorded():
    target = Target()
    assert isinstance(recorder_of(target, 8, CPU), ExpertRecorder)
    assert isinstance(recording(ReferenceKernels()), RecordingKernels)
    target.kernels = ReferenceKernels()
    assert recorder_of(target, 8, CPU) is NO_RECORDER
    assert NO_RECORDER.over(target) is target


def test_a_result_has_the_experts_of_committed_rows():
    """One accepted draft of three, none of two, a prompt's chunk, and rows that are replayed."""
    requests = (
        ScheduledRequest(3, 1, 3, samples=True),
        ScheduledRequest(0, 1, 2, samples=True),
        ScheduledRequest(1, 4, 0, samples=False),
        ScheduledRequest(2, 5, 0, samples=False, replays=True),
    )
    plan = StepPlan(9, requests=requests)
    starts = StepLayout.of(plan).row_starts
    assert starts == (0, 4, 7, 11, 16)
    rows = torch.zeros(4, NUM_COUNTS + 4, dtype=torch.int64)
    rows[:, 0], rows[0, 1:4], rows[1, 1] = 9, torch.tensor((3, 3, 1)), 2
    buffer = HostBuffer(rows)
    buffer.experts = StepExperts(np.arange(16).reshape(16, 1, 1), starts)
    found = [one.routed_experts for one in buffer.read(plan).requests]
    assert [one[:, 0, 0].tolist() for one in found[:3]] == [[0, 1], [4], [7, 8, 9, 10]]
    assert found[3] is None
    buffer.experts = NO_EXPERTS
    assert {one.routed_experts for one in buffer.read(plan).requests} == {None}

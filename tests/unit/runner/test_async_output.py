"""Host buffers: read only after landing, never shared by two copies in flight."""

from __future__ import annotations

import pytest
import torch

from sametoken.core.plan import PlanRow, StepPlan
from sametoken.errors import InvariantError
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.stream import LaggingStream
from sametoken.state.inputs import StepInputs
from sametoken.verification.base import Verdict


def inputs(num_drafts: list[int], samples: list[bool]) -> StepInputs:
    batch = len(num_drafts)
    zeros = torch.zeros(batch, dtype=torch.int64)
    fields = dict.fromkeys(StepInputs.__slots__, zeros)
    fields.update(num_drafts=torch.tensor(num_drafts), samples=torch.tensor(samples), step_id=0)
    return StepInputs(**fields)


def verdict(num_accepted: list[int], tokens: list[int]) -> Verdict:
    batch = len(num_accepted)
    return Verdict(
        num_accepted=torch.tensor(num_accepted),
        next_token=torch.zeros(batch, dtype=torch.int64),
        tokens=torch.tensor(tokens),
        poisoned=torch.zeros(batch, dtype=torch.bool),
    )


PLAN = StepPlan(7, rows=(PlanRow(2, 1, 3, True), PlanRow(0, 8, 0, False), PlanRow(1, 1, 3, True)))


def test_emitted_tokens_are_the_accepted_drafts_and_the_next_token():
    buffer = HostBuffer.allocate(4, 3)
    buffer.copy_from(
        inputs([3, 0, 1], [True, False, True]), verdict([1, 0, 1], [10, 11, 12, 13, 20, 21]), None
    )
    result = buffer.read(PLAN)
    assert result.step_id == 7
    assert [row.token_ids for row in result.rows] == [(10, 11), (), (20, 21)]
    assert [row.num_drafts for row in result.rows] == [3, 0, 1]
    assert [row.num_accepted for row in result.rows] == [1, 0, 1]


def test_reading_before_the_copy_landed_raises():
    buffer = HostBuffer.allocate(4, 3)
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN)
    buffer.copy_from(inputs([0, 0, 0], [True, False, True]), verdict([0, 0, 0], [10, 20]), None)
    buffer.read(PLAN)
    buffer.clear()
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN)


def test_every_step_in_flight_has_a_buffer_of_its_own():
    ring = OutputRing.allocate(2, 4, 3)
    stream = LaggingStream()

    def submit(tokens: list[int]) -> PendingOutput:
        buffer = ring.acquire()
        x = inputs([0, 0, 0], [True, False, True])
        work = lambda: buffer.copy_from(x, verdict([0, 0, 0], tokens), None)  # noqa: E731
        return PendingOutput(PLAN, buffer, stream.submit(work), ring)

    first, second = submit([1, 2]), submit([3, 4])
    with pytest.raises(InvariantError, match="every output buffer"):
        ring.acquire()
    assert [row.token_ids for row in first.wait().rows] == [(1,), (), (2,)]
    third = submit([5, 6])
    assert [row.token_ids for row in second.wait().rows] == [(3,), (), (4,)]
    assert [row.token_ids for row in third.wait().rows] == [(5,), (), (6,)]

"""Host buffers: read only after landing, never shared by two copies in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sametoken.core.plan import PlanRow, StepPlan
from sametoken.core.structured_outputs import Stuck
from sametoken.errors import InvariantError, StaleInputsError
from sametoken.runner.async_output import OutputRing, PendingOutput
from sametoken.runner.outcome import pack
from sametoken.runner.stream import LaggingStream
from sametoken.state.inputs import StepInputs
from sametoken.verification.base import Verdict


def outcome(
    num_drafts: list[int],
    samples: list[bool],
    num_accepted: list[int],
    tokens: list[int],
    poisoned: tuple[bool, ...] | None = None,
    stuck: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A packed verdict of step 7 whose windows hold ``tokens`` side by side."""
    batch = len(num_drafts)
    zeros = torch.zeros(batch, dtype=torch.int64)
    widths = (torch.tensor(num_drafts) + 1) * torch.tensor(samples)
    named = dict.fromkeys(StepInputs.__slots__, zeros)
    named.update(
        step_id=7,
        num_drafts=torch.tensor(num_drafts),
        samples=torch.tensor(samples),
        window_starts=widths.cumsum(0) - widths,
    )
    verdict = Verdict(
        num_accepted=torch.tensor(num_accepted),
        next_token=zeros,
        tokens=torch.tensor(tokens),
        poisoned=torch.tensor(poisoned or (False,) * batch),
        stuck=torch.tensor(stuck or (0,) * batch),
    )
    return pack(StepInputs(**named), verdict, window=4)


PLAN = StepPlan(7, rows=(PlanRow(2, 1, 3, True), PlanRow(0, 8, 0, False), PlanRow(1, 1, 3, True)))
IN_ORDER = (0, 1, 2)


def test_emitted_tokens_are_the_accepted_drafts_and_the_next_token():
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    packed = outcome([3, 0, 1], [True, False, True], [1, 0, 1], [10, 11, 12, 13, 20, 21])
    buffer.copy_from(packed, 0)
    result = buffer.read(PLAN, IN_ORDER)
    assert result.step_id == 7
    assert [row.token_ids for row in result.rows] == [(10, 11), (), (20, 21)]
    assert [row.num_drafts for row in result.rows] == [3, 0, 1]
    assert [row.num_accepted for row in result.rows] == [1, 0, 1]


def test_a_poisoned_row_says_why():
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    tokens = [10, 11, 12, 13, 20, 21]
    flags = {"poisoned": (True, False, True), "stuck": (0, 0, Stuck.SLOW)}
    buffer.copy_from(outcome([3, 0, 1], [True, False, True], [0, 0, 0], tokens, **flags), 0)
    rows = buffer.read(PLAN, IN_ORDER).rows
    assert [row.poisoned for row in rows] == [True, False, True]
    assert [row.stuck for row in rows] == [Stuck.NOT, Stuck.NOT, Stuck.SLOW]


def test_reading_before_the_copy_landed_raises():
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN, IN_ORDER)
    buffer.copy_from(outcome([0, 0, 0], [True, False, True], [0, 0, 0], [10, 20]), 0)
    buffer.read(PLAN, IN_ORDER)
    buffer.clear()
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN, IN_ORDER)


def test_every_step_in_flight_has_a_buffer_of_its_own():
    ring = OutputRing.allocate(2, 4, 3)
    stream = LaggingStream()

    def submit(tokens: list[int]) -> PendingOutput:
        buffer = ring.acquire()
        packed = outcome([0, 0, 0], [True, False, True], [0, 0, 0], tokens)
        landed = stream.submit(lambda: buffer.copy_from(packed, 0))
        return PendingOutput(PLAN, IN_ORDER, buffer, landed, ring)

    first, second = submit([1, 2]), submit([3, 4])
    with pytest.raises(InvariantError, match="every output buffer"):
        ring.acquire()
    assert [row.token_ids for row in first.wait().rows] == [(1,), (), (2,)]
    third = submit([5, 6])
    assert [row.token_ids for row in second.wait().rows] == [(3,), (), (4,)]
    assert [row.token_ids for row in third.wait().rows] == [(5,), (), (6,)]


def test_parts_of_a_step_land_side_by_side():
    """Windows first, then chunks: the order says where each plan row went."""
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    buffer.copy_from(outcome([3, 1], [True, True], [1, 1], [10, 11, 12, 13, 20, 21]), 0)
    buffer.copy_from(outcome([0], [False], [0], []), 2)
    result = buffer.read(PLAN, (0, 2, 1))
    assert [row.token_ids for row in result.rows] == [(10, 11), (), (20, 21)]


def test_a_verdict_of_another_step_is_refused():
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    buffer.copy_from(outcome([0, 0, 0], [True, False, True], [0, 0, 0], [10, 20]), 0)
    with pytest.raises(StaleInputsError, match="step 8 was answered with the verdict of step 7"):
        buffer.read(replace(PLAN, step_id=8), IN_ORDER)

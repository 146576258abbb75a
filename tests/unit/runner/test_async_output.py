"""Host buffers: read only after landing, never shared by two copies in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sametoken.errors import InvariantError, StaleInputsError
from sametoken.ops.step.types import HAS_NAN, NO_TOKEN, SOUND
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.routed_experts import NO_EXPERTS, StepExperts
from sametoken.runner.stream import LaggingStream
from sametoken.types.plan import ScheduledRequest, StepPlan
from sametoken.types.structured_outputs import MaskFault

PLAN = StepPlan(
    7,
    requests=(
        ScheduledRequest(2, 1, 3, True),
        ScheduledRequest(1, 1, 3, True),
        ScheduledRequest(0, 8, 0, False),
    ),
)
GARBAGE = 10**12


def buffer_of(*results: list[int]) -> HostBuffer:
    """A buffer where results have landed, garbage behind what means something."""
    buffer = OutputRing.allocate(1, 4, 3).acquire()
    land(buffer, *results)
    return buffer


def land(buffer: HostBuffer, *results: list[int]) -> None:
    width = buffer.rows.shape[1]
    for place, result in enumerate(results):
        buffer.rows[place] = torch.tensor([*result, *[GARBAGE] * (width - len(result))])


def test_emitted_tokens_are_the_accepted_drafts_and_the_next_token():
    result = buffer_of([7, 3, 3, 1, 0, 10, 11, 12, 13], [7, 1, 2, 1, 0, 20, 21], [7, 0, 0, 0, 0])
    found = result.read(PLAN)
    assert found.step_id == 7
    assert [row.token_ids for row in found.requests] == [(10, 11), (20, 21), ()]
    assert [row.num_drafts for row in found.requests] == [3, 1, 0]
    assert [row.num_proposed for row in found.requests] == [3, 2, 0]
    assert [row.num_accepted for row in found.requests] == [1, 1, 0]


def test_a_poisoned_row_says_why():
    """The host knows better than the device why a grammar allows nothing."""
    plan = replace(PLAN, requests=(PLAN.requests[0],) * 4)
    faults = (SOUND, HAS_NAN, NO_TOKEN, NO_TOKEN)
    buffer = buffer_of(*([7, 3, 3, 0, fault, 10] for fault in faults))
    buffer.mask_faults = {0: MaskFault.SLOW, 1: MaskFault.SLOW, 3: MaskFault.SLOW}
    rows = buffer.read(plan).requests
    assert [row.failed for row in rows] == [False, True, True, True]
    assert [row.mask_fault for row in rows] == [
        MaskFault.NONE,
        MaskFault.NONE,
        MaskFault(1),
        MaskFault.SLOW,
    ]


def test_reading_before_the_copy_landed_raises():
    buffer = buffer_of([7, 0, 0, 0, 0, 10], [7, 0, 0, 0, 0, 20])
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN)
    land(buffer, *[[7, 0, 0, 0, 0, 10]] * 3)
    buffer.mask_faults[0] = MaskFault.SLOW
    buffer.experts = StepExperts(np.zeros((3, 1, 1)), (0, 1, 2, 3))
    buffer.read(PLAN)
    buffer.clear()
    assert not buffer.mask_faults
    assert buffer.experts is NO_EXPERTS
    with pytest.raises(InvariantError, match="in flight"):
        buffer.read(PLAN)


def test_every_step_in_flight_has_a_buffer_of_its_own():
    ring = OutputRing.allocate(2, 4, 3)
    stream = LaggingStream()
    first_places = {buffer.first_place for buffer in ring.free}
    assert first_places == {0, 4}

    def submit(token: int) -> PendingOutput:
        buffer = ring.acquire()
        result = [7, 0, 0, 0, 0, token]
        # As a device writes: at the places that the buffer names.
        rows = ring.rows[buffer.first_place :]
        landed = stream.submit(lambda: land(replace(buffer, rows=rows), *[result] * 3))
        return PendingOutput(PLAN, buffer, landed, ring)

    first, second = submit(1), submit(3)
    first.buffer.mask_faults[0] = MaskFault.SLOW
    with pytest.raises(InvariantError, match="every output buffer"):
        ring.acquire()
    assert [row.token_ids for row in first.wait().requests] == [(1,), (1,), ()]
    third = submit(5)
    assert not third.buffer.mask_faults
    with pytest.raises(InvariantError, match="in flight"):
        third.buffer.read(PLAN)
    assert [row.token_ids for row in second.wait().requests] == [(3,), (3,), ()]
    assert [row.token_ids for row in third.wait().requests] == [(5,), (5,), ()]


def test_a_result_of_another_step_is_refused():
    buffer = buffer_of(*[[7, 0, 0, 0, 0, 10]] * 3)
    with pytest.raises(StaleInputsError, match="step 8 was answered with the result of step 7"):
        buffer.read(replace(PLAN, step_id=8))

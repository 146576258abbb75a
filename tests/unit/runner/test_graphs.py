"""Layouts of captured steps: the n-th launch reads the n-th, whatever is written meanwhile."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from helpers.step_scenes import DEVICE, STATIC_OPS
from sametoken.runner.graphs import LayoutRing, StepGraphs
from sametoken.types.layout import NO_REQUESTS, StepLayout, StepShape
from sametoken.types.plan import ScheduledRequest, StepPlan

RESERVED = 7
each_op = pytest.mark.parametrize("ops", STATIC_OPS.values(), ids=STATIC_OPS)


def shape_of(num_requests: int) -> StepShape:
    return StepShape(num_requests, num_requests, num_requests, num_requests, 1, 1)


@each_op
@pytest.mark.parametrize("in_flight", [1, 3])
def test_launches_read_their_own_layouts_however_far_the_host_is_ahead(in_flight, ops):
    ring = LayoutRing.allocate(in_flight + 1, shape_of(5), ops, DEVICE)
    written: list[tuple[StepShape, list[list[int]]]] = []
    read = 0
    for turn in range(11):
        rows = tuple(ScheduledRequest(slot, 1, 0, True) for slot in range(turn % 4))
        shape = shape_of(max(1 + turn % 5, len(rows)))
        table = StepLayout.of(StepPlan(turn, requests=rows)).table(shape, RESERVED, 10 * turn)
        ring.write(table)
        written.append((shape, table))
        if len(written) - read == in_flight or turn == 10:
            for shape, table in written[read:]:
                memory = ring.memory(shape).fill_(-(10**9))
                ring.fetch(memory)
                assert memory.tolist() == table
            read = len(written)
    assert ring.num_launches.item() == 11


@each_op
def test_what_is_captured_on_is_all_padding(ops):
    ring = LayoutRing.allocate(2, shape_of(3), ops, DEVICE)
    ring.write(NO_REQUESTS.table(shape_of(3), RESERVED, 0))
    memory = ring.memory(shape_of(3))
    ring.fetch(memory)
    assert memory[0].tolist() == [RESERVED] * 4
    assert not memory[1:5].any()


class Full(LayoutRing):
    """A ring on a device that other processes have filled."""

    def memory(self, shape):
        raise torch.OutOfMemoryError


@each_op
def test_a_capture_without_memory_leaves_host_and_device_at_one_count(ops, monkeypatch):
    """An engine that has no room to wake up may wake up later."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    ring = LayoutRing.allocate(2, shape_of(3), ops, DEVICE)
    full = Full(ring.entries, ring.num_launches, ops)
    step = SimpleNamespace(sequences=SimpleNamespace(reserved_slot=RESERVED))
    with pytest.raises(torch.OutOfMemoryError):
        StepGraphs(step, (shape_of(3),), full, None)._warm_up(shape_of(3))
    assert full._written == ring.num_launches.item() == 0


def test_the_sizes_of_a_step_are_counted_once_however_many_shapes_are_captured():
    """Once for each, a crowd of 1,024 took half of the host's time."""
    counted = []

    class Counted(StepLayout):
        @property
        def shape(self):
            counted.append(self.step_id)
            return super().shape

    rows = tuple(ScheduledRequest(slot, 1, 0, True) for slot in range(7))
    layout = Counted.of(StepPlan(3, requests=rows))
    eager = SimpleNamespace(run=lambda *arguments: None)
    StepGraphs(None, tuple(map(shape_of, range(1, 7))), None, eager).run(layout, 0, None)
    assert counted == [3]

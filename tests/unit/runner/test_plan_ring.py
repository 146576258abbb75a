"""Plans of captured steps: the n-th launch reads the n-th plan, whatever is written meanwhile."""

from __future__ import annotations

import torch

from sametoken.runner.padded import PLAN_FIELDS
from sametoken.runner.plan_ring import NO_PLACE, PlanRing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESERVED = 7


def rows_of(turn: int, count: int) -> list[tuple[int, ...]]:
    return [(slot, turn, 1, 100 + turn, 10 * turn + slot) for slot in range(count)]


def test_launches_read_their_own_plans_however_far_the_host_is_ahead():
    ring = PlanRing.allocate(4, 5, RESERVED, DEVICE)
    written: list[tuple[list[tuple[int, ...]], int]] = []
    read = 0
    for turn in range(11):
        rows, batch = rows_of(turn, turn % 4), 1 + turn % 5 if turn % 4 < 1 + turn % 5 else 5
        ring.write(rows, batch)
        written.append((rows, batch))
        # Up to three launches are in flight.
        if len(written) - read == 3 or turn == 10:
            for rows, batch in written[read:]:
                plan = ring.memory(batch).fill_(-(10**9))
                ring.fetch(plan)
                padding = [(RESERVED, *[0] * (PLAN_FIELDS - 1), NO_PLACE)] * (batch - len(rows))
                assert [tuple(row) for row in plan.t().tolist()] == [*rows, *padding]
            read = len(written)
    assert ring.turn.item() == 11


def test_a_launch_without_a_plan_finds_padding():
    ring = PlanRing.allocate(2, 3, RESERVED, DEVICE)
    plan = ring.memory(3)
    ring.fetch(plan)
    assert plan[0].tolist() == [RESERVED] * 3

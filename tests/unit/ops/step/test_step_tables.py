"""What the host sets in tables by slot, against lists that are set one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.step_scenes import ALL_OPS, DEVICE
from sametoken.ops.step import triton_tables
from sametoken.ops.step.types import TableWrite

SLOTS, WIDTH = 4, 1100
EXTREMES = (2**63 - 1, -(2**63), 2**53 + 1, 0, -1)
numbers = {
    torch.int64: st.sampled_from(EXTREMES),
    torch.float32: st.floats(width=32, allow_nan=False),
    torch.float64: st.floats(allow_nan=False),
}
each_op = pytest.mark.parametrize("ops", ALL_OPS.values(), ids=ALL_OPS)


@st.composite
def writes_of_a_plan(draw):
    """Numbers of columns, and rows of a table; some of them share memory."""
    found = []
    for _ in range(draw(st.integers(0, 6))):
        slot = draw(st.integers(0, SLOTS - 1))
        if draw(st.booleans()):
            dtype = draw(st.sampled_from(list(numbers)))
            found.append((dtype, slot, draw(numbers[dtype])))
        else:
            first = draw(st.integers(0, WIDTH - 1))
            length = draw(st.integers(1, WIDTH - first))
            found.append((first, slot, tuple(range(length, 0, -1))))
    return found


@each_op
@given(writes_of_a_plan())
def test_tables_hold_the_last_of_what_was_written(ops, drawn):
    columns = {dtype: torch.zeros(SLOTS, dtype=dtype, device=DEVICE) for dtype in numbers}
    table = torch.zeros(SLOTS, WIDTH, dtype=torch.int64, device=DEVICE)
    expected = {dtype: torch.zeros(SLOTS, dtype=dtype) for dtype in numbers}
    expected_rows = torch.zeros(SLOTS, WIDTH, dtype=torch.int64)
    writes = []
    for place, slot, values in drawn:
        if isinstance(place, torch.dtype):
            writes.append(TableWrite(columns[place][slot], values))
            expected[place][slot] = values
        else:
            last = place + len(values)
            writes.append(TableWrite(table[slot, place:last], values))
            expected_rows[slot, place:last] = torch.tensor(values)
    ops.write_tables(writes)
    assert torch.equal(table.cpu(), expected_rows)
    for dtype, column in expected.items():
        assert torch.equal(columns[dtype].cpu(), column)


def test_parts_that_only_touch_share_no_memory():
    assert not triton_tables._share_memory([96, 0, 64], [2, 16, 8])
    assert triton_tables._share_memory([96, 0, 64], [2, 17, 8])


def test_a_plan_of_many_admissions_is_one_launch(monkeypatch):
    launches, kernel = [], triton_tables._write_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_tables, "_write_kernel", Counted())
    table = torch.zeros(9, 3, dtype=torch.int64, device=DEVICE)
    triton_tables.write_tables([TableWrite(table[slot], (slot, 2, 3)) for slot in range(9)])
    triton_tables.write_tables([])
    assert launches == [(9,)]
    assert table.tolist() == [[slot, 2, 3] for slot in range(9)]
    # Programs of one launch have no order.
    triton_tables.write_tables([TableWrite(table[0], (1, 1, 1)), TableWrite(table[0, 1:], (2, 2))])
    assert launches == [(9,)]
    assert table[0].tolist() == [1, 2, 2]

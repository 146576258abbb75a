"""The rows of each slot that a pass folds, commits and leaves pending, on a GPU.

The reference is ``layout.slot_rows``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.model.recurrent.rule import Folded
from sametoken.ops.pdl import gdc_wait, pdl_options

# Columns of the table of runs.
SLOT = tl.constexpr(0)
FIRST_ROW = tl.constexpr(1)
STOP_ROW = tl.constexpr(2)
NUM_ROWS = tl.constexpr(3)
NUM_FOLDED = tl.constexpr(4)
NUM_LASTING = tl.constexpr(5)
EMPTY = tl.constexpr(6)
BROKEN = tl.constexpr(7)
FIELDS = tl.constexpr(8)

_ROW_BLOCK = 128


#: From this number of rows on, a pass's longest run is as long as it says: captured steps, which
#: only limit its length, have fewer rows.
EXACT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Runs:
    """The plan of a pass for each of its B runs of rows; a run has one slot.

    Attributes:
        table: [B, 8] int64: slot, first row, end row, live rows, folded rows, lasting rows,
            whether nothing is folded yet, whether the rows do not follow the slot's.
        rows: the runs on the host.
    """

    table: Tensor
    rows: RowRuns


@triton.jit(
    do_not_specialize=["rows_per_run", "reserved_slot", "max_pending", "state_stride"],
    do_not_specialize_on_alignment=["starts"],
)
def _plan_runs_kernel(
    positions,  # [T]
    slots,  # [T]
    committed,  # [T] bool, or None: every row is
    starts,  # [B + 1], or None: each run has rows_per_run rows
    position,  # [S], written
    num_pending,  # [S], written
    runs,  # [B, FIELDS], written
    rows_per_run,
    reserved_slot,
    max_pending,
    state_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # A PDL barrier (no trigger): the layers' kernels read the table, and states that the previous
    # pass wrote, before they wait.
    gdc_wait(PDL)
    run = tl.program_id(0).to(tl.int64)
    if starts is None:
        first = run * rows_per_run
        stop = first + rows_per_run
    else:
        first, stop = tl.load(starts + run), tl.load(starts + run + 1)
    slot = tl.load(slots + first, first < stop, other=reserved_slot).to(tl.int64)

    num_rows, num_committed, end_committed = first * 0, first * 0, first * 0
    for at in range(first, stop, BLOCK):
        row = at + tl.arange(0, BLOCK)
        own = (row < stop) & (tl.load(slots + row, row < stop, other=-1) == slot)
        lasts = own
        if committed is not None:
            lasts = own & (tl.load(committed + row, row < stop, other=0) != 0)
        num_rows += tl.sum(own.to(tl.int64), axis=0)
        num_committed += tl.sum(lasts.to(tl.int64), axis=0)
        end_committed = tl.maximum(
            end_committed, tl.max(tl.where(lasts, row - first + 1, 0), axis=0)
        )

    here = tl.load(positions + first, first < stop, other=0)
    before, pending = tl.load(position + slot), tl.load(num_pending + slot)
    begins = here == 0
    before = tl.where(begins, 0, before)
    num_folded = tl.where(begins, 0, here - before)
    # Rows after drafts that are not verified yet do not show which of these were accepted.
    num_lasting = tl.where(num_committed > 0, num_folded + num_committed, 0)
    num_lasting = num_lasting // state_stride * state_stride
    left = num_folded + num_rows - num_lasting
    follows = begins | ((num_folded >= 0) & (num_folded <= pending))
    sound = follows & (end_committed == num_committed) & (left <= max_pending)
    live = slot != reserved_slot
    runs_on = live & sound

    field = runs + run * FIELDS
    tl.store(field + SLOT, slot)
    tl.store(field + FIRST_ROW, first)
    tl.store(field + STOP_ROW, stop)
    tl.store(field + NUM_ROWS, tl.where(runs_on, num_rows, 0))
    tl.store(field + NUM_FOLDED, tl.where(runs_on, num_folded, 0))
    tl.store(field + NUM_LASTING, tl.where(runs_on, num_lasting, 0))
    tl.store(field + EMPTY, (before == 0).to(tl.int64))
    tl.store(field + BROKEN, (live & ~sound).to(tl.int64))
    tl.store(position + slot, before + num_lasting, runs_on)
    tl.store(num_pending + slot, left, runs_on)


def plan_runs(rows: AttentionRows, folded: Folded) -> Runs:
    """Derive the rows that a pass folds, commits and leaves pending; updates ``folded``.

    Rows that do not follow the slot's folded and pending rows change nothing, and ``advance``
    gives NaN for them. The reference is ``layout.slot_rows`` with the stride of ``folded``.

    Args:
        rows: the pass's T rows. A run is one slot's live rows, then dead ones on the reserved
            slot; a slot has one run.
        folded: folded and pending rows of each slot; written.

    Raises:
        InvariantError: rows without runs.
    """
    runs, position, num_pending = rows.runs, folded.position, folded.num_pending
    if runs is None:
        raise InvariantError("a pass was given rows without runs", "set AttentionRows.runs")
    assert runs.starts is not None or runs.count * runs.max_rows <= rows.slots.shape[0]
    for tensor in (rows.slots, rows.positions, position, num_pending, rows.committed):
        assert tensor is None or tensor.is_contiguous()
    table = position.new_empty(runs.count, FIELDS.value)
    if runs.count:
        _plan_runs_kernel[(runs.count,)](
            rows.positions,
            rows.slots,
            rows.committed,
            runs.starts,
            position,
            num_pending,
            table,
            runs.max_rows,
            position.shape[0] - 1,
            folded.max_pending,
            folded.state_stride,
            BLOCK=_ROW_BLOCK,
            num_warps=1,
            **pdl_options(position),
        )
    return Runs(table, runs)


@triton.jit
def fact(field, place: tl.constexpr):
    """A field of a run, read past L1, which may not hold another kernel's writes yet."""
    return tl.load(field + place, cache_modifier=".cg")

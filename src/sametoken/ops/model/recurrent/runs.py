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
from sametoken.ops.launch_sizes import next_power_of_2
from sametoken.ops.model.recurrent.rule import FAST_ROWS, Folded
from sametoken.ops.pdl import gdc_wait, pdl_options
from sametoken.ops.triton_versions import FUSED

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

# Columns of the table of chunks, and where the rows before a chunk are.
CHUNK_SLOT = tl.constexpr(0)
CHUNK_ROW = tl.constexpr(1)
CHUNK_ROWS = tl.constexpr(2)
CHUNK_BEFORE = tl.constexpr(3)
CHUNK_FIELDS = tl.constexpr(4)
IN_PASS, IN_HISTORY, NOWHERE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_ROW_BLOCK = 128


#: From this number of rows on, a pass's longest run is as long as it says: captured steps, which
#: only limit its length, have fewer rows.
EXACT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class FastRuns:
    """The runs of a pass that are in the fast form, of its long runs.

    Attributes:
        first_run, num_runs: the long runs.
        num_chunks: N, the most chunks that they have, each run's last one perhaps with fewer rows.
        runs: as ``Runs.table``; the others have no rows here.
        chunks: [N, 4] int64: slot, first row, rows, and where the rows before it are (``IN_PASS``,
            ``IN_HISTORY``, ``NOWHERE``); unused ones have no rows.
        first_chunks: [num_runs] int64, of each long run.
    """

    first_run: int
    num_runs: int
    num_chunks: int
    runs: Tensor
    chunks: Tensor
    first_chunks: Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """The plan of a pass for each of its B runs of rows; a run has one slot.

    Attributes:
        table: [B, 8] int64: slot, first row, end row, live rows, folded rows, lasting rows,
            whether nothing is folded yet, whether the rows do not follow the slot's. Those in the
            fast form have no rows here.
        rows: the runs on the host.
        fast: those in the fast form; None: there can be none.
    """

    table: Tensor
    rows: RowRuns
    fast: FastRuns | None = None

    @property
    def are_long(self) -> bool:
        """Whether an uneven number of programs per multiprocessor costs more than PDL saves."""
        return self.rows.max_rows >= 128


@triton.jit(
    do_not_specialize=[
        "rows_per_run",
        "reserved_slot",
        "max_pending",
        "state_stride",
        "least_len",
    ],
    do_not_specialize_on_alignment=["starts"],
)
def _plan_runs_kernel(
    positions,  # [T]
    slots,  # [T]
    committed,  # [T] bool, or None: every row is
    starts,  # [B + 1], or None: each run has rows_per_run rows
    position,  # [S], written
    num_pending,  # [S], written
    prompt_len,  # [S], or None: no prompt has a fast form
    runs,  # [B, FIELDS], written
    fast_runs,  # [B, FIELDS], or None, written
    rows_per_run,
    reserved_slot,
    max_pending,
    state_stride,
    least_len,  # tokens from which prompts have a fast form
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # A PDL barrier (no trigger): the layers' kernels read the table, and states that the previous
    # pass wrote, before they wait.
    gdc_wait(PDL)
    run = tl.program_id(0).to(tl.int64)
    if starts is None:
        first, stop = run * rows_per_run, (run + 1) * rows_per_run
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
    is_fast = first < 0
    if prompt_len is not None:
        # ``types.fast_prompts.FastForm.end``
        length = tl.load(prompt_len + slot)
        is_fast = (length >= least_len) & (here < length - (length % FAST == 1).to(tl.int64))
    # In the fast form nothing is left pending: drafts or none, the state is the same.
    num_lasting -= tl.where(is_fast, 0, num_lasting % state_stride)
    left = num_folded + num_rows - num_lasting
    follows = begins | ((num_folded >= 0) & (num_folded <= pending))
    sound = follows & (end_committed == num_committed) & (left <= max_pending)
    live = slot != reserved_slot
    runs_on = live & sound

    broken = live & ~sound
    empty = (before == 0).to(tl.int64)
    facts = slot, first, stop, num_rows, num_folded, num_lasting, empty
    _store_run(runs + run * FIELDS, facts, runs_on & ~is_fast, broken & ~is_fast, ~is_fast)
    if fast_runs is not None:
        _store_run(fast_runs + run * FIELDS, facts, runs_on & is_fast, broken & is_fast, is_fast)
    tl.store(position + slot, before + num_lasting, runs_on)
    tl.store(num_pending + slot, left, runs_on)


@triton.jit
def _store_run(field, facts, runs_on, broken, is_own):
    """Of a run that is in the other table, only that it has no row."""
    slot, first, stop, num_rows, num_folded, num_lasting, empty = facts
    tl.store(field + SLOT, slot)
    tl.store(field + FIRST_ROW, first)
    tl.store(field + STOP_ROW, tl.where(is_own, stop, first))
    tl.store(field + NUM_ROWS, tl.where(runs_on, num_rows, 0))
    tl.store(field + NUM_FOLDED, tl.where(runs_on, num_folded, 0))
    tl.store(field + NUM_LASTING, tl.where(runs_on, num_lasting, 0))
    tl.store(field + EMPTY, empty)
    tl.store(field + BROKEN, broken.to(tl.int64))


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
    prompts = rows.fast_prompts if runs.num_short < runs.count else None
    tables = position.new_empty(2 if prompts else 1, runs.count, FIELDS.value)
    if runs.count:
        _plan_runs_kernel[(runs.count,)](
            rows.positions,
            rows.slots,
            rows.committed,
            runs.starts,
            position,
            num_pending,
            prompts and prompts.prompt_len,
            tables[0],
            tables[1] if prompts else None,
            runs.max_rows,
            position.shape[0] - 1,
            folded.max_pending,
            folded.state_stride,
            prompts.least_len if prompts else 0,
            FAST=FAST_ROWS,
            BLOCK=_ROW_BLOCK,
            num_warps=1,
            **pdl_options(position),
        )
    fast = _plan_chunks(tables[1], runs, len(rows.slots), len(position)) if prompts else None
    return Runs(tables[0], runs, fast)


@triton.jit(do_not_specialize=["first_run"])
def _plan_chunks_kernel(
    runs,  # [B, FIELDS]
    chunks,  # [N, CHUNK_FIELDS], written
    first_chunks,  # [R], written
    first_run,
    CHUNK: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    own = tl.program_id(0)
    runs += first_run * FIELDS
    run = tl.arange(0, BLOCK_RUNS)
    first = tl.load(runs + run * FIELDS + FIRST_ROW, run < own, other=0)
    stop = tl.load(runs + run * FIELDS + STOP_ROW, run < own, other=0)
    first_chunk = tl.sum((stop - first + CHUNK - 1) // CHUNK, axis=0)
    tl.store(first_chunks + own, first_chunk)
    field = runs + own * FIELDS
    slot, first_row, stop_row = fact(field, SLOT), fact(field, FIRST_ROW), fact(field, STOP_ROW)
    num_rows = fact(field, NUM_ROWS)
    before = tl.where(fact(field, EMPTY) != 0, NOWHERE, IN_HISTORY)
    for row in range(0, stop_row - first_row, CHUNK):
        at = chunks + (first_chunk + row // CHUNK) * CHUNK_FIELDS
        tl.store(at + CHUNK_SLOT, slot)
        tl.store(at + CHUNK_ROW, first_row + row)
        tl.store(at + CHUNK_ROWS, tl.minimum(tl.maximum(num_rows - row, 0), CHUNK))
        tl.store(at + CHUNK_BEFORE, tl.where(row > 0, IN_PASS, before))


def _plan_chunks(table: Tensor, runs: RowRuns, num_rows: int, num_slots: int) -> FastRuns:
    """The chunks of the runs in the fast form, of which ``table`` is."""
    first, count = runs.num_short, runs.count - runs.num_short
    num_chunks = num_rows // FAST_ROWS + count
    chunks = table.new_zeros(num_chunks, CHUNK_FIELDS.value)
    first_chunks = table.new_empty(count)
    _plan_chunks_kernel[(count,)](
        table,
        chunks,
        first_chunks,
        first,
        CHUNK=FAST_ROWS,
        BLOCK_RUNS=next_power_of_2(max(num_slots, count)),
        num_warps=1,
        **FUSED,
    )
    return FastRuns(first, count, num_chunks, table, chunks, first_chunks)


@triton.jit
def fact(field, place: tl.constexpr):
    """A field of a run, read past L1, which may not hold another kernel's writes yet."""
    return tl.load(field + place, cache_modifier=".cg")


@triton.jit
def facts(field):
    """All of a run's, loaded together: dependent loads would cost as much as the row itself."""
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, stop_row = fact(field, NUM_ROWS).to(tl.int32), fact(field, STOP_ROW)
    num_folded, num_lasting = fact(field, NUM_FOLDED).to(tl.int32), fact(field, NUM_LASTING)
    empty, broken = fact(field, EMPTY) != 0, fact(field, BROKEN) != 0
    return slot, first_row, num_rows, stop_row, num_folded, num_lasting, empty, broken


@triton.jit
def fill_dead(out, num_rows, stop, broken, inside, WIDTH: tl.constexpr):
    """Fill dead rows with zeros; all rows of a broken run with NaN."""
    fill = tl.zeros(inside.shape, tl.float32) + tl.where(broken, float("nan"), 0.0)
    for row in range(num_rows, stop):
        tl.store(out + row * WIDTH, fill.to(out.dtype.element_ty), inside)

"""Walks of long runs on Hopper, in Gluon: what rules share.

A long run is a chain from row to row, so what counts is how soon a row ends. Groups of prepared
rows are copied into shared memory while earlier ones are walked, and the warps of a program, each
with its part of a head's state, walk a group without a barrier. What a row needs first is loaded
while the row before it is walked.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sametoken.ops.hopper_layouts import barrier, copy_to_shared
from sametoken.ops.model.recurrent.runs import (
    BROKEN,
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_LASTING,
    NUM_ROWS,
    SLOT,
    STOP_ROW,
)

#: Warps of a program.
WARPS = gl.constexpr(4)
#: Rows of a group, groups in shared memory, and rows that the compiler may interleave: sixteen do
#: not stay in the instruction cache.
GROUP = gl.constexpr(32)
SLOTS = gl.constexpr(3)
UNROLLED = gl.constexpr(8)
#: One number, in all threads.
ONE = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[0]] * 2, [], [1]))
#: Rows side by side in shared memory, and the elements of one.
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def new_ring(COUNT: gl.constexpr):
    """Shared memory for COUNT elements of each row in flight: [SLOTS, GROUP, COUNT] fp32."""
    return gl.allocate_shared_memory(gl.float32, [SLOTS, GROUP, COUNT], PLAIN)


@gluon.jit
def rows_of(ring):
    """A ring by row: [SLOTS * GROUP, COUNT]."""
    return ring._reinterpret(gl.float32, [SLOTS * GROUP, ring.shape[2]], LINE)


@gluon.jit
def _copy_columns(memory, prepared, first, end, WIDTH: gl.constexpr):
    """Begin to copy a group's rows from ``first`` on, without those from ``end`` on."""
    COUNT: gl.constexpr = memory.shape[1]
    EACH: gl.constexpr = min(COUNT, 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, EACH], [32 * EACH // max(COUNT, EACH), COUNT // EACH], [WARPS, 1], [1, 0]
    )
    row = first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = prepared + row * WIDTH + column
    copy_to_shared(memory, at, mask=(row < end) & (column < COUNT))


@gluon.jit
def number(row):
    """The one element of a row in shared memory."""
    return gl.sum(row.load(ONE), axis=0)


@gluon.jit
def _copy_group(rings, slot, prepared, columns, first, end, WIDTH: gl.constexpr):
    for i in gl.static_range(len(rings)):
        _copy_columns(rings[i].index(slot), prepared + columns[i], first, end, WIDTH)
    async_copy.commit_group()


@gluon.jit
def store_row(out, row, read, WIDTH: gl.constexpr):
    """Store what a row reads, unless the row is negative: folded ones have no output."""
    gl.store(out + row * WIDTH, read.to(out.dtype.element_ty), mask=row >= 0)


@gluon.jit
def walk_rows(
    state, rings, rows, prepared, columns, ends, state_at, out,
    load_ahead: gl.constexpr, walk_row: gl.constexpr, store_state: gl.constexpr,
    WIDTH: gl.constexpr, OUT_WIDTH: gl.constexpr,
):  # fmt: skip
    """Walk folded and new rows of a run; the state is stored after the rows that last.

    Args:
        state: before them.
        rings, columns: shared memory, and the first of a prepared row's columns that it gets.
        prepared: of the run's first row.
        rows: what ``load_ahead`` and ``walk_row`` read of shared memory.
        ends: of folded, lasting and all rows.
        load_ahead: (rows, i) -> what row i needs first.
        walk_row: (state, that, rows, i, last, out, shift, OUT_WIDTH) -> the state after row i, and
            what the next row up to ``last`` needs first; row i + shift of ``out`` is stored.
        store_state: (state_at, state).
    """
    num_folded, num_lasting, total = ends
    begin = 0
    for piece in range(2):
        end = num_lasting if piece == 0 else total
        for slot in gl.static_range(SLOTS - 1):
            _copy_group(rings, slot, prepared, columns, begin + slot * GROUP, end, WIDTH)
        slot = 0
        for first in range(begin, end, GROUP):
            async_copy.wait_group(SLOTS - 2)
            barrier()
            at, rest = slot * GROUP, min(GROUP, end - first)
            ahead, last, shift = load_ahead(rows, at), at + rest - 1, first - num_folded - at
            uneven = at + rest // UNROLLED * UNROLLED
            for row in range(at, uneven, UNROLLED):
                for i in gl.static_range(UNROLLED):
                    state, ahead = walk_row(
                        state, ahead, rows, row + i, last, out, shift, OUT_WIDTH
                    )
            for row in range(uneven, last + 1):
                state, ahead = walk_row(state, ahead, rows, row, last, out, shift, OUT_WIDTH)
            # All warps have left the slot before: they met above.
            free = (slot + SLOTS - 1) % SLOTS
            _copy_group(rings, free, prepared, columns, first + (SLOTS - 1) * GROUP, end, WIDTH)
            slot = (slot + 1) % SLOTS
        async_copy.wait_group(0)
        barrier()
        if (piece == 0) & (num_lasting > 0):
            store_state(state_at, state)
        begin = end


@gluon.jit
def end_of(runs, first, end):
    """The run after the last that has rows: padding comes last."""
    RUNS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    last = first
    for begin in range(first, end, 128):
        run = begin + gl.arange(0, 128, layout=RUNS)
        begins = gl.load(runs + run * FIELDS + FIRST_ROW, mask=run < end, other=0)
        stops = gl.load(runs + run * FIELDS + STOP_ROW, mask=run < end, other=0)
        last = gl.maximum(last, gl.max(gl.where(stops > begins, run + 1, first), 0))
    return last


@gluon.jit
def facts_of(field):
    """Of a run: its slot, first row, rows, whether it has a state, and ends of its rows."""
    num_rows = gl.load(field + NUM_ROWS).to(gl.int32)
    num_folded = gl.load(field + NUM_FOLDED).to(gl.int32)
    ends = num_folded, gl.load(field + NUM_LASTING).to(gl.int32), num_folded + num_rows
    exists = gl.load(field + EMPTY) == 0
    return gl.load(field + SLOT), gl.load(field + FIRST_ROW), num_rows, exists, ends


@gluon.jit
def fill_dead(field, first_row, num_rows, out, WIDTH: gl.constexpr):
    """Fill dead rows with zeros; all rows of a broken run with NaN."""
    dead = gl.where(gl.load(field + BROKEN) != 0, float("nan"), 0.0).to(out.dtype.element_ty)
    for row in range(num_rows, (gl.load(field + STOP_ROW) - first_row).to(gl.int32)):
        gl.store(out + row * WIDTH, dead)

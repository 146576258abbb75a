"""Copy a pass's raw rows into the slots' history and pending rows."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.runs import (
    EMPTY,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_LASTING,
    NUM_ROWS,
    SLOT,
    fact,
)
from sametoken.ops.pdl import gdc_wait

#: Channels of raw rows that a warp copies at once.
KEPT_CHANNELS = 512
# Rows that it copies at once; of those that pend already, fewer are left behind a stored state.
_KEPT_ROWS = tl.constexpr(STATE_STRIDE)
# Warps that fit on a multiprocessor, with 32 columns of a state in each.
_WARPS = 8


@triton.jit
def keep_raw(
    keeper,
    num_keepers,
    mixed,  # [T, C], rows mixed_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart; None: a row has one gate
    field,  # [FIELDS] of the run
    history,  # [S, K - 1, C], written
    pending_mixed,  # [S, P, C], written
    pending_gates,  # [S, P, HV], or [S, P, 2 * HV] with b, written
    mixed_stride,
    a_stride,
    b_stride,
    max_pending,
    C: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the next history and pending rows of a slot, for some blocks of channels."""
    TAPS: tl.constexpr = K - 1
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, num_folded = fact(field, NUM_ROWS).to(tl.int32), fact(field, NUM_FOLDED)
    num_lasting, empty = fact(field, NUM_LASTING), fact(field, EMPTY) != 0
    gdc_wait(PDL)
    if num_rows > 0:
        history += slot * TAPS * C
        pending_mixed += slot * max_pending * C
        tap = tl.arange(0, triton.next_power_of_2(max(TAPS, 1)))
        index = num_lasting + tap
        raw = _raw_row(
            index, mixed, history, pending_mixed, first_row, num_folded, mixed_stride, C, TAPS
        )
        exists = (tap < TAPS) & ((index >= TAPS) | (empty == 0))
        # New rows from ``first_new`` on become pending, after the ``stays`` rows that stay pending.
        first_stay = tl.minimum(num_lasting, num_folded)
        stays, first_new = num_folded - first_stay, num_lasting - first_stay
        num_moved = tl.where(first_stay > 0, stays, 0)
        num_new = (num_rows - first_new).to(tl.int32)
        mixed += (first_row + first_new) * mixed_stride
        for block in range(keeper, (C + BLOCK - 1) // BLOCK, num_keepers):
            column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = column < C
            kept = tl.load(raw[:, None] + column, exists[:, None] & inside, other=0.0)
            # All threads read, then they meet, then they write.
            pending = pending_mixed + column
            _move_rows(pending, C, first_stay, num_moved, inside)
            _copy_rows(mixed + column, mixed_stride, pending + stays * C, C, num_new, inside)
            tl.store(history + tap[:, None] * C + column, kept, (tap < TAPS)[:, None] & inside)
        if keeper == 0:
            GATES: tl.constexpr = HV if b is None else 2 * HV
            head = tl.arange(0, triton.next_power_of_2(HV))[None, :]
            gates = pending_gates + slot * max_pending * GATES + head
            new, inside, at = first_row + first_new, head < HV, stays * GATES
            _move_rows(gates, GATES, first_stay, num_moved, inside)
            _copy_rows(a + new * a_stride + head, a_stride, gates + at, GATES, num_new, inside)
            if b is not None:
                gates += HV
                _move_rows(gates, GATES, first_stay, num_moved, inside)
                _copy_rows(b + new * b_stride + head, b_stride, gates + at, GATES, num_new, inside)


@triton.jit
def _raw_row(
    index,  # [n]; 0 is the oldest row of the history
    mixed,  # [T, C], mixed_stride apart
    history,  # [K - 1, C] of the slot
    pending,  # [P, C] of the slot
    first_row,
    num_folded,
    mixed_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Pointers to a slot's raw rows: history, pending rows, then the pass's."""
    row = index - TAPS
    new = first_row + row - num_folded
    held = tl.where(row < 0, history + index * C, pending + row * C)
    return tl.where(row < num_folded, held, mixed + new * mixed_stride)


@triton.jit
def _move_rows(at, stride, first, num_rows, inside):
    """Move rows from ``first`` on, fewer than _KEPT_ROWS, to the beginning, at [1, n] addresses."""
    place = tl.arange(0, _KEPT_ROWS)[:, None]
    moves = (place < num_rows) & inside
    values = tl.load(at + (first + place) * stride, moves, other=0.0)
    tl.debug_barrier()
    tl.store(at + place * stride, values, moves)


@triton.jit
def _copy_rows(source, source_stride, target, target_stride, num_rows, inside):
    """Copy rows at [1, n] addresses, _KEPT_ROWS at a time."""
    place = tl.arange(0, _KEPT_ROWS)[:, None]
    for first in range(0, num_rows, _KEPT_ROWS):
        row = first + place
        values = tl.load(source + row * source_stride, (row < num_rows) & inside, other=0.0)
        tl.store(target + row * target_stride, values, (row < num_rows) & inside)


def num_keepers(programs: int, batch: int, num_warps: int, channels: int, *, long: bool) -> int:
    """Number of programs of a run that copy raw rows: one per block, or fewer to fit one wave.

    For long runs, few enough that no multiprocessor gets an extra program, if any fit.
    """
    blocks: int = triton.cdiv(channels, KEPT_CHANNELS * num_warps)
    places = MULTIPROCESSORS * _WARPS // num_warps
    if long:
        places = triton.cdiv(programs * batch, MULTIPROCESSORS) * MULTIPROCESSORS
    room = places // batch - programs
    return min(blocks, room) if room > 0 else blocks

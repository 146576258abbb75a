"""What rules share of chunks of 64 positions on a GPU: raw rows, their convolution, gates, runs."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.recurrent.convolution_triton import sigmoid
from sametoken.ops.model.recurrent.rule import FAST_ROWS
from sametoken.ops.model.recurrent.runs import (
    BROKEN,
    CHUNK_BEFORE,
    CHUNK_FIELDS,
    CHUNK_ROW,
    CHUNK_ROWS,
    CHUNK_SLOT,
    EMPTY,
    FIELDS,
    FIRST_ROW,
    IN_HISTORY,
    IN_PASS,
    NUM_ROWS,
    SLOT,
    STOP_ROW,
)

CHUNK = tl.constexpr(FAST_ROWS)
#: Rows that a program prepares at once, and such parts of a chunk.
PART = tl.constexpr(32)
PARTS = tl.constexpr(FAST_ROWS // 32)
# Channels of raw rows that a program keeps at once.
_CHANNELS = tl.constexpr(128)


@triton.constexpr_function
def tile_size(size):
    """The size of a tile that holds ``size``: products have at least 16 rows and columns."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def part_to_prepare(chunks, mixed, stride, history, C: tl.constexpr, K: tl.constexpr):
    """This program's chunk, its first row in that, and where its raw rows are."""
    chunk, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    field, first = chunks + chunk * CHUNK_FIELDS, part * PART
    row, num_rows = tl.load(field + CHUNK_ROW), tl.load(field + CHUNK_ROWS)
    before = tl.where(part == 0, tl.load(field + CHUNK_BEFORE), IN_PASS)
    history += tl.load(field + CHUNK_SLOT) * (K - 1) * C
    return chunk, first, (mixed, stride, row + first, num_rows - first, history, before)


@triton.jit
def convolved_part(
    raw, first, conv_weight, conv_bias, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr
):
    """SiLU of the convolution of D channels from ``first`` on: [PART, tile_size(D)] fp32.

    Rows that a part lacks are zeros.
    """
    mixed, stride, row, num_rows, history, before = raw
    column = tl.arange(0, tile_size(D))[None, :]
    inside, channel, index = column < D, first + column, tl.arange(0, PART)[:, None]
    total = tl.zeros((PART, channel.shape[1]), tl.float32)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(K):
        at = index + (tap - K + 1)
        exists = inside & (index < num_rows) & ((at >= 0) | (before == IN_PASS))
        x = tl.load(mixed + (row + at) * stride + channel, exists, other=0.0).to(tl.float32)
        # A branch, as addresses that depend on a row are no whole vectors; one tap at a time, as
        # the order of a sum must not depend on where a pass begins.
        if before == IN_HISTORY:
            held = history + (at + K - 1) * C + channel
            x += tl.load(held, inside & (at < 0), other=0.0).to(tl.float32)
        weight = tl.load(conv_weight + tap * C + channel, inside, other=0.0).to(tl.float32)
        total += weight * x
    return tl.where(index < num_rows, total * sigmoid(total), 0.0)


@triton.jit
def store_part(out, x, strides, D: tl.constexpr):
    """D columns of [PART, tile_size(D)] at distances by row and by column."""
    row_stride, stride = strides
    column = tl.arange(0, tile_size(D))[None, :]
    tl.store(out + tl.arange(0, PART)[:, None] * row_stride + column * stride, x, column < D)


@triton.jit
def store_gates(gates, values, H: tl.constexpr):
    """Of a chunk, each [H, CHUNK]; they are [CHUNK, n] of n >= H heads."""
    head = tl.arange(0, values[0].shape[1])[None, :]
    at = gates + head * CHUNK + tl.arange(0, CHUNK)[:, None]
    for place in tl.static_range(len(values)):
        tl.store(at + place * H * CHUNK, values[place], head < H)


@triton.jit
def run_to_scan(runs, first_chunks, first_run):
    """This program's run: its first chunk, and facts of it."""
    run = tl.program_id(1)
    field = runs + (first_run + run).to(tl.int64) * FIELDS
    slot, first = tl.load(field + SLOT), tl.load(field + FIRST_ROW)
    num_rows = tl.load(field + NUM_ROWS).to(tl.int32)
    # Has a state to begin with; a broken run has rows to fill.
    begun = (tl.load(field + EMPTY) == 0) & (num_rows > 0)
    bad_rows = tl.where(tl.load(field + BROKEN) != 0, tl.load(field + STOP_ROW) - first, 0)
    return tl.load(first_chunks + run), (slot, first, num_rows, begun, bad_rows)


@triton.jit
def keep_history(mixed, stride, history, facts, C: tl.constexpr, TAPS: tl.constexpr):
    """Store a run's last raw rows; each of its programs does so for some channels."""
    slot, first_row, num_rows, begun, _ = facts
    mixed += first_row * stride
    history += slot * TAPS * C
    tap = tl.arange(0, triton.next_power_of_2(max(TAPS, 1)))[:, None]
    row = num_rows - TAPS + tap
    for first in range(tl.program_id(0) * _CHANNELS, C, tl.num_programs(0) * _CHANNELS):
        channel = first + tl.arange(0, _CHANNELS)[None, :]
        inside = (tap < TAPS) & (channel < C)
        held = history + (row + TAPS) * C + channel
        new = tl.load(mixed + row * stride + channel, inside & (row >= 0), other=0.0)
        old = tl.load(held, inside & (row < 0) & begun, other=0.0)
        # All threads read, then they meet, then they write.
        tl.debug_barrier()
        tl.store(history + tap * C + channel, tl.where(row < 0, old, new), inside)


@triton.jit
def fill_broken(out, stride, bad_rows, inside):
    """NaN for the rows of a run that do not follow their slot's."""
    bad = tl.where(inside, float("nan"), 0.0).to(out.dtype.element_ty)
    for row in range(bad_rows):
        tl.store(out + row * stride, bad, inside)

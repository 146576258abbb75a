# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""The arithmetic of attention that every launch form shares, so that bits agree."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_range(position, SPLIT: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """First and last split that any of these rows sees; absent rows are at -1."""
    last = tl.max(position)
    first = tl.maximum(lowest_of(position) - SLIDING_WINDOW + 1, 0) if SLIDING_WINDOW else 0 * last
    return (first // SPLIT).to(tl.int32), (last // SPLIT).to(tl.int32)


@triton.jit
def lowest_of(position):
    """The lowest position of the queries that take part; -1 if none does."""
    return tl.min(tl.where(position < 0, tl.max(position), position))


@triton.jit
def next_turn(turn, position, acc):
    """The position whose queries are computed next, by themselves; above all at the end.

    A query gives weight 0 to positions that it cannot see but another one here can, and 0
    times a value that is not finite is NaN. So all queries are computed together in turn -1,
    and if that gave NaN, those of each position alone: then nothing that they cannot see is
    read.
    """
    spread_out = lowest_of(position) < tl.max(position)
    again = turn >= 0
    if spread_out & (turn < 0):
        again = tl.max(tl.max((acc != acc).to(tl.int32), 0), 0) != 0
    end = tl.max(position) + 1
    following = tl.min(tl.where(position > turn, position, end))
    return tl.where(again, following, end)


@triton.jit
def of_turn(turn, position):
    """Positions of the queries of this turn, -1 for the others."""
    return tl.where((turn < 0) | (position == turn), position, -1)


@triton.jit
def split_result(
    q,  # [BLOCK_DIM, queries]
    position,  # [queries] int64, -1 for queries that take no part
    split,
    table,  # [max_blocks] int64: the slot's blocks
    keys,
    values,
    block_stride,
    position_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    """One split's weighted values [BLOCK_DIM, queries], total weight and highest score.

    Tiles that a row cannot see leave its numbers as they are, to the bit, so the rows it is
    computed beside do not matter. Positions that no row here can see are not read at all.
    KV is the left operand of both products: a few queries then still fill the matrix unit.
    """
    BLOCK_DIM: tl.constexpr = q.shape[0]
    QUERIES: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_DIM)
    ones = tl.full([16, TILE], 1.0, q.dtype)
    acc = tl.zeros([BLOCK_DIM, QUERIES], tl.float32)
    # Weights are totalled by the matrix unit, in the order of the positions; tl.sum would
    # add in an order that follows the query tile.
    totals = tl.zeros([16, QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    stop = tl.minimum((split + 1) * SPLIT, tl.max(position) + 1).to(tl.int32)
    for begin in tl.range(split * SPLIT, stop, TILE):
        at = begin + tl.arange(0, TILE)
        block = tl.load(table + at // BLOCK_SIZE, mask=at < stop, other=0)
        offset = block * block_stride + (at % BLOCK_SIZE) * position_stride
        seen = at < stop
        if SLIDING_WINDOW:
            seen = seen & (at > lowest_of(position) - SLIDING_WINDOW)
        kv_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + offset[:, None] + dim[None, :], mask=kv_mask, other=0)
        scores = tl.dot(k, q, input_precision="ieee")
        visible = at[:, None] <= position[None, :]
        if SLIDING_WINDOW:
            visible = visible & (at[:, None] > position[None, :] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2((scores - base[None, :]) * scale).to(q.dtype)
        shrink = tl.exp2((peak - base) * scale)
        v = tl.load(values + offset[:, None] + dim[None, :], mask=kv_mask, other=0)
        acc = tl.dot(v.T, weights, acc * shrink[None, :], input_precision="ieee")
        totals = tl.dot(ones, weights, totals * shrink[None, :], input_precision="ieee")
        peak = new_peak
    return acc, tl.max(totals, 0), peak


@triton.jit
def merged(acc, total, peak, part, scale):
    """Add a split's partial result to that of the splits before it.

    The multiply-adds are explicit: left to the compiler, they could be contracted one way in
    one kernel and another way in the next.
    """
    acc_split, total_split, peak_split = part
    new_peak = tl.maximum(peak, peak_split)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old = tl.exp2((peak - base) * scale)
    new = tl.exp2((peak_split - base) * scale)
    total = tl.fma(total, old, total_split * new)
    acc = tl.fma(acc, old[None, :], acc_split * new[None, :])
    return acc, total, new_peak


@triton.jit
def normalised(acc, total):
    """Weighted values over total weight; queries that took no part have none and give 0."""
    return acc / tl.where(total == 0.0, 1.0, total)[None, :]

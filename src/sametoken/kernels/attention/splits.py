# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Splits of a row's KV: one by itself, all of them walked in order, or partial results merged."""

from __future__ import annotations

import triton
import triton.language as tl

from sametoken.kernels.attention.arithmetic import (
    block_of,
    empty_split,
    end_of,
    merged,
    per_element,
    per_query,
    split_range,
    total_of,
    with_tile,
)


@triton.jit
def split_result(
    q,  # as for with_tile
    position,
    split,
    table,
    keys,
    values,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """One split's weighted values, total weight and highest score."""
    acc, totals, peak = empty_split(BLOCK_DIM, position.shape[0], KV_LEFT)
    stop = end_of(position, split, SPLIT)
    block = block_of(table, split * SPLIT, stop, BLOCK_SIZE)
    for begin in tl.range(split * SPLIT, stop, TILE):
        following = block_of(table, begin + TILE, stop, BLOCK_SIZE)
        acc, totals, peak = with_tile(
            (acc, totals, peak), q, position, begin, stop, block, table, keys, values, block_stride,
            scale, HEAD_DIM, BLOCK_SIZE, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        block = following
    return acc, total_of(totals, KV_LEFT), peak


@triton.jit
def walked(
    q,  # as for with_tile
    position,
    table,
    keys,
    values,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """All splits of these queries, each merged where it ends, in one loop over their tiles.

    One loop, so that loads of a split are on their way while the one before is computed.
    """
    QUERIES: tl.constexpr = position.shape[0]
    first, last = split_range(position, SPLIT, SLIDING_WINDOW)
    stop = end_of(position, last, SPLIT)
    acc, totals, peak = empty_split(BLOCK_DIM, QUERIES, KV_LEFT)
    sums, weight, top = acc, tl.zeros([QUERIES], tl.float32), peak
    block = block_of(table, first * SPLIT, stop, BLOCK_SIZE)
    for begin in tl.range(first * SPLIT, stop, TILE):
        following = block_of(table, begin + TILE, stop, BLOCK_SIZE)
        acc, totals, peak = with_tile(
            (acc, totals, peak), q, position, begin, stop, block, table, keys, values, block_stride,
            scale, HEAD_DIM, BLOCK_SIZE, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        block = following
        # By selection: a branch would stand between the matrix unit and its accumulators.
        ends = ((begin + TILE) % SPLIT == 0) | (begin + TILE >= stop)
        part = (acc, total_of(totals, KV_LEFT), peak)
        whole = merged(sums, weight, top, part, scale, KV_LEFT)
        sums = tl.where(ends, whole[0], sums)
        weight = tl.where(ends, whole[1], weight)
        top = tl.where(ends, whole[2], top)
        acc = tl.where(ends, 0.0, acc)
        totals = tl.where(ends, 0.0, totals)
        peak = tl.where(ends, float("-inf"), peak)
    return sums, weight


@triton.jit
def merged_parts(
    sums,  # [queries, max_splits, HEAD_DIM] fp32
    stats,  # [queries, max_splits, 2] fp32: total weight, highest score
    index,  # [queries] int32, where in sums and stats
    position,  # [queries] int32, -1 for queries that take no part
    max_splits,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """Partial results of all splits, merged in order; splits that a query lacks change nothing."""
    acc, _, peak = empty_split(BLOCK_DIM, position.shape[0], KV_LEFT)
    total = tl.zeros([position.shape[0]], tl.float32)
    first, last = split_range(position, SPLIT, SLIDING_WINDOW)
    # Four splits' loads in flight, or two of a great query tile, then as many merges.
    AT_ONCE: tl.constexpr = 4 if position.shape[0] <= 16 else 2
    for split in range(first, last + 1, AT_ONCE):
        part_0 = _part(
            sums, stats, index, position, split, max_splits,
            HEAD_DIM, BLOCK_DIM, SPLIT, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        part_1 = _part(
            sums, stats, index, position, split + 1, max_splits,
            HEAD_DIM, BLOCK_DIM, SPLIT, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        if AT_ONCE == 4:
            part_2 = _part(
                sums, stats, index, position, split + 2, max_splits,
                HEAD_DIM, BLOCK_DIM, SPLIT, SLIDING_WINDOW, KV_LEFT,
            )  # fmt: skip
            part_3 = _part(
                sums, stats, index, position, split + 3, max_splits,
                HEAD_DIM, BLOCK_DIM, SPLIT, SLIDING_WINDOW, KV_LEFT,
            )  # fmt: skip
        acc, total, peak = merged(acc, total, peak, part_0, scale, KV_LEFT)
        acc, total, peak = merged(acc, total, peak, part_1, scale, KV_LEFT)
        if AT_ONCE == 4:
            acc, total, peak = merged(acc, total, peak, part_2, scale, KV_LEFT)
            acc, total, peak = merged(acc, total, peak, part_3, scale, KV_LEFT)
    return acc, total


@triton.jit
def _part(
    sums,
    stats,
    index,
    position,
    split,
    max_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    at = index * max_splits + split
    seen = split * SPLIT <= position
    if SLIDING_WINDOW:
        seen = seen & ((split + 1) * SPLIT > position - SLIDING_WINDOW + 1)
    dim = per_element(tl.arange(0, BLOCK_DIM), KV_LEFT)
    mask = per_query(seen, KV_LEFT) & (dim < HEAD_DIM)
    # From L2: another multiprocessor may have written them in this very launch.
    acc = tl.load(sums + per_query(at, KV_LEFT) * HEAD_DIM + dim, mask, 0, cache_modifier=".cg")
    total = tl.load(stats + at * 2, seen, 0, cache_modifier=".cg")
    peak = tl.load(stats + at * 2 + 1, seen, float("-inf"), cache_modifier=".cg")
    return acc, total, peak

"""Splits of a row's KV: one split, all splits in sequence, and the merge of partial results."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.attention.arithmetic import (
    block_of,
    empty_split,
    end_of,
    merged,
    normalised,
    scaled,
    split_range,
    total_of,
    with_tile,
)
from sametoken.ops.pdl import prefetch_l2


@triton.jit
def prefetch_split(
    split,
    last_position,
    memory,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prefetch a split's KV into L2 while the kernel before still writes the newest of it."""
    table, keys, values, block_stride = memory
    ROW_BYTES: tl.constexpr = HEAD_DIM * (keys.dtype.element_ty.primitive_bitwidth // 8)
    if PDL and ROW_BYTES % 16 == 0:
        at = tl.minimum(split * SPLIT + tl.arange(0, SPLIT), last_position)
        block = tl.load(table + at // BLOCK_SIZE)
        row = block * block_stride + at % BLOCK_SIZE * HEAD_DIM
        prefetch_l2((keys + row).to(tl.int64), ROW_BYTES)
        prefetch_l2((values + row).to(tl.int64), ROW_BYTES)


@triton.jit
def split_result(
    q,  # as for with_tile
    position,
    split,
    memory,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """One split's weighted values, total weight and maximum score."""
    acc, totals, peak = empty_split(BLOCK_DIM, position.shape[0], KV_LEFT)
    stop = end_of(position, split, SPLIT)
    block = block_of(memory, split * SPLIT, stop, BLOCK_SIZE)
    for begin in tl.range(split * SPLIT, stop, TILE):
        following = block_of(memory, begin + TILE, stop, BLOCK_SIZE)
        acc, totals, peak = with_tile(
            (acc, totals, peak), q, position, begin, stop, block, memory, scale,
            HEAD_DIM, BLOCK_SIZE, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        block = following
    return acc, total_of(totals, KV_LEFT), peak


@triton.jit
def sequential_result(
    q,  # as for with_tile
    position,
    memory,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """All splits of these queries, each merged at its end, in one loop over their tiles.

    Returns weighted values, total weights and maximum scores.

    One loop, so that a split's loads are pipelined behind the split before.
    """
    QUERIES: tl.constexpr = position.shape[0]
    first, last = split_range(position, SPLIT, SLIDING_WINDOW)
    stop = end_of(position, last, SPLIT)
    acc, totals, peak = empty_split(BLOCK_DIM, QUERIES, KV_LEFT)
    sums, weight, top = acc, tl.zeros([QUERIES], tl.float32), peak
    block = block_of(memory, first * SPLIT, stop, BLOCK_SIZE)
    for begin in tl.range(first * SPLIT, stop, TILE):
        following = block_of(memory, begin + TILE, stop, BLOCK_SIZE)
        acc, totals, peak = with_tile(
            (acc, totals, peak), q, position, begin, stop, block, memory, scale,
            HEAD_DIM, BLOCK_SIZE, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        block = following
        # Selects, not a branch, which would force the accumulators out of the tensor cores.
        ends = ((begin + TILE) % SPLIT == 0) | (begin + TILE >= stop)
        part = (acc, total_of(totals, KV_LEFT), peak)
        whole = merged(sums, weight, top, part, scale, KV_LEFT)
        sums = tl.where(ends, whole[0], sums)
        weight = tl.where(ends, whole[1], weight)
        top = tl.where(ends, whole[2], top)
        acc = tl.where(ends, 0.0, acc)
        totals = tl.where(ends, 0.0, totals)
        peak = tl.where(ends, float("-inf"), peak)
    return sums, weight, top


@triton.jit
def merged_parts(
    sums,  # [max_splits, HEAD_DIM] fp32
    stats,  # [max_splits, 2] fp32: total weight, maximum score
    first,
    last,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Merge one query's partial results in the order of the splits: [BLOCK_DIM, 1] and two [1]."""
    acc, _, peak = empty_split(BLOCK_DIM, 1, True)
    total = tl.zeros([1], tl.float32)
    # Four splits' loads in flight, then four merges; splits past the last have no effect.
    for split in range(first, last + 1, 4):
        parts = ()
        for ahead in tl.static_range(4):
            parts += (_part(sums, stats, split + ahead, last, HEAD_DIM, BLOCK_DIM),)
        for ahead in tl.static_range(4):
            acc, total, peak = merged(acc, total, peak, parts[ahead], scale, True)
    return acc, total, peak


@triton.jit
def _part(sums, stats, split, last, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    dim = tl.arange(0, BLOCK_DIM)[:, None]
    stat = stats + split * 2 + tl.arange(0, 1)
    seen = split <= last
    acc = tl.load(sums + split * HEAD_DIM + dim, seen & (dim < HEAD_DIM), 0)
    total = tl.load(stat, seen, 0)
    peak = tl.load(stat + 1, seen, float("-inf"))
    return acc, total, peak


@triton.jit
def store_output(out, at, acc, total, scales, kv_head, dead, HEAD_DIM: tl.constexpr):
    """Store at ``at`` one query's output, of what its splits merged to; 0 if its row is dead."""
    result = scaled(normalised(acc, total, True), scales, kv_head)
    if dead is not None:
        result = tl.where(dead, 0.0, result)
    dim = tl.arange(0, acc.shape[0])[:, None]
    tl.store(out + at * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Causal attention over paged KV on a GPU, with one arithmetic for every kind of row.

A row's KV is cut into splits of a fixed size, anchored at position 0. Each split gives a
partial result (weighted values, their total weight, the highest score), and partial results
are merged in the order of the splits. Whether one program walks the splits of its rows
("walk") or many programs take one split each and a second kernel merges ("spread") is a
matter of speed: both run ``_split`` and ``_merged``, so the bits agree, for every query tile
and every window (tests/gpu/test_attention_gpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV

#: Positions per split: part of a row's arithmetic, so one constant for the whole engine.
SPLIT = 256

#: Programs that keep the chip busy; beyond them the spread form only adds traffic.
BUSY_PROGRAMS = 528

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How a launch is cut up. Only ``split`` and ``tile`` take part in a row's bits.

    Attributes:
        spread: one program per split and a merging kernel, rather than one that walks.
        block_queries: rows x query heads per program, a power of two from 16.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        split: positions per split, a multiple of ``tile``.
        tile: positions per loop turn.
    """

    spread: bool
    block_queries: int
    num_warps: int
    num_stages: int
    split: int = SPLIT
    tile: int = 64


def attention(
    q: Tensor,
    shape: AttentionShape,
    rows: AttentionRows,
    kv: LayerKV,
    *,
    window: int | None = None,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of [T, H, D] queries over their slots' KV: [T, H * D] in q's dtype.

    The launch follows from shapes and host arguments alone, so it can be captured.

    Args:
        q: [T, H, D], contiguous, bf16, fp16 or fp32.
        shape: head counts.
        rows: where the rows stand.
        kv: the layer's KV, both tensors contiguous within a block and of equal strides.
        window: if given, every run of so many rows (from row 0) belongs to one slot;
            otherwise slots are found on the device, in the walk form.
        max_seq_len: no row stands at this position or beyond; by default what the block
            table has room for.
        sliding_window: if given, a row sees its last so many positions only.
        config: how to cut the launch up; chosen from the shapes by default.

    Raises:
        InvariantError: the spread form without a window, or rows that windows do not divide.
    """
    num_rows, block_size = q.shape[0], kv.keys.shape[2]
    capacity = rows.block_table.shape[1] * block_size
    max_seq_len = capacity if max_seq_len is None else min(max_seq_len, capacity)
    config = config or choose(num_rows, shape, window, max_seq_len, q.dtype)
    if window is None and config.spread:
        raise InvariantError("attention over ragged rows has the walk form only")
    if num_rows % (window or num_rows):
        raise InvariantError(f"{num_rows} rows are not made of windows of {window}")
    assert q.is_contiguous()
    assert kv.keys.stride() == kv.values.stride()
    assert kv.keys.stride(3) == 1
    assert rows.block_table.stride(1) == 1
    assert config.split % config.tile == 0

    out = q.new_empty(num_rows, shape.num_heads * shape.head_dim)
    _launch(q, shape, rows, kv, out, window, max_seq_len, sliding_window or 0, config)
    return out


def choose(
    num_rows: int, shape: AttentionShape, window: int | None, max_seq_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """How to cut up a launch, from its shapes."""
    group = shape.num_heads // shape.num_kv_heads
    width = triton.next_power_of_2(min(window or num_rows, num_rows) * group)
    largest = 16 if dtype == torch.float32 else 64
    block_queries = max(16, triton.next_power_of_2(group), min(largest, width))
    tiles = (
        triton.cdiv(num_rows, block_queries // group)
        if window is None
        else (num_rows // window * triton.cdiv(window, block_queries // group))
    )
    busy = tiles * shape.num_kv_heads >= BUSY_PROGRAMS
    spread = window is not None and not busy and max_seq_len > SPLIT
    return AttentionConfig(spread, block_queries, num_warps=4, num_stages=2)


def _launch(
    q: Tensor,
    shape: AttentionShape,
    rows: AttentionRows,
    kv: LayerKV,
    out: Tensor,
    window: int | None,
    max_seq_len: int,
    sliding_window: int,
    config: AttentionConfig,
) -> None:
    num_rows, group = q.shape[0], shape.num_heads // shape.num_kv_heads
    width = window or num_rows
    tiles = num_rows // width * triton.cdiv(width, config.block_queries // group)
    max_splits = triton.cdiv(max_seq_len, config.split)
    lanes, sums, stats = 1, None, None
    if config.spread:
        lanes = min(max_splits, triton.cdiv(2 * BUSY_PROGRAMS, tiles * shape.num_kv_heads))
        size = (num_rows, shape.num_heads, max_splits)
        sums = q.new_empty(*size, shape.head_dim, dtype=torch.float32)
        stats = q.new_empty(*size, 2, dtype=torch.float32)
    scale = shape.scale * LOG2_E
    _attention_kernel[(tiles, shape.num_kv_heads, lanes)](
        q,
        kv.keys,
        kv.values,
        rows.positions,
        rows.slots,
        rows.block_table,
        out,
        sums,
        stats,
        width,
        max_splits,
        rows.block_table.stride(0),
        kv.keys.stride(0),
        kv.keys.stride(1),
        kv.keys.stride(2),
        scale,
        RAGGED=window is None,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=kv.keys.shape[2],
        BLOCK_QUERIES=config.block_queries,
        SPLIT=config.split,
        TILE=config.tile,
        SLIDING_WINDOW=sliding_window,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if config.spread:
        _merge_kernel[(num_rows, shape.num_heads)](
            sums,
            stats,
            rows.positions,
            out,
            max_splits,
            scale,
            HEAD_DIM=shape.head_dim,
            BLOCK_DIM=triton.next_power_of_2(shape.head_dim),
            SPLIT=config.split,
            SLIDING_WINDOW=sliding_window,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["width", "max_splits"])
def _attention_kernel(
    q,  # [num_rows, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    block_table,  # [num_slots, max_blocks] int64
    out,  # [num_rows, heads, HEAD_DIM]
    sums,  # [num_rows, heads, max_splits, HEAD_DIM] fp32, or None: walk the splits
    stats,  # [num_rows, heads, max_splits, 2] fp32, or None
    width,  # rows per window; all rows if RAGGED
    max_splits,
    table_stride,
    block_stride,
    head_stride,
    position_stride,
    scale,
    RAGGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    TILE_ROWS: tl.constexpr = BLOCK_QUERIES // GROUP
    tiles_per_window = tl.cdiv(width, TILE_ROWS)
    window_first = (tl.program_id(0) // tiles_per_window) * width
    first = window_first + (tl.program_id(0) % tiles_per_window) * TILE_ROWS
    stop = tl.minimum(first + TILE_ROWS, window_first + width)
    kv_head = tl.program_id(1)

    query = tl.arange(0, BLOCK_QUERIES)
    row = first + query // GROUP
    present = (row < stop) & (query < TILE_ROWS * GROUP)
    row = tl.where(present, row, first)
    position = tl.where(present, tl.load(positions + row), -1)
    dim = tl.arange(0, BLOCK_DIM)
    # Query (row, head) as one index into [num_rows * heads].
    index = (row * tl.num_programs(1) + kv_head).to(tl.int64) * GROUP + query % GROUP
    q_mask = present[:, None] & (dim < HEAD_DIM)[None, :]
    q_tile = tl.load(q + index[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0)
    head_keys = keys + kv_head * head_stride
    head_values = values + kv_head * head_stride

    if sums is not None:
        table = block_table + tl.load(slots + first) * table_stride
        first_split, last_split = _splits(position, SPLIT, SLIDING_WINDOW)
        for split in range(first_split + tl.program_id(2), last_split + 1, tl.num_programs(2)):
            acc, total, peak = _split(
                q_tile, position, split, table, head_keys, head_values, block_stride,
                position_stride, scale, HEAD_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW,
            )  # fmt: skip
            at = index * max_splits + split
            tl.store(sums + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)
            tl.store(stats + at * 2, total, mask=present)
            tl.store(stats + at * 2 + 1, peak, mask=present)
    else:
        acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        owner = tl.load(slots + row)
        while first < stop:
            slot = tl.load(slots + first)
            following = stop
            if RAGGED:
                others = present & (row > first) & (owner != slot)
                following = tl.min(tl.where(others, row, stop))
            mine = present & (row >= first) & (row < following)
            limit = tl.where(mine, position, -1)
            table = block_table + slot * table_stride
            first_split, last_split = _splits(limit, SPLIT, SLIDING_WINDOW)
            for split in range(first_split, last_split + 1):
                part = _split(
                    q_tile, limit, split, table, head_keys, head_values, block_stride,
                    position_stride, scale, HEAD_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW,
                )  # fmt: skip
                merged = _merged(acc, total, peak, part, scale)
                acc = tl.where(mine[:, None], merged[0], acc)
                total = tl.where(mine, merged[1], total)
                peak = tl.where(mine, merged[2], peak)
            first = following
        at = index[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + at, _normalised(acc, total).to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _splits(position, SPLIT: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """First and last split that any of these rows sees; absent rows are at -1."""
    last = tl.max(position)
    lowest = tl.min(tl.where(position < 0, last, position))
    first = tl.maximum(lowest - SLIDING_WINDOW + 1, 0) if SLIDING_WINDOW else 0 * last
    return (first // SPLIT).to(tl.int32), (last // SPLIT).to(tl.int32)


@triton.jit
def _split(
    q,  # [queries, BLOCK_DIM]
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
    """One split's weighted values [queries, BLOCK_DIM], total weight and highest score.

    Tiles that a row cannot see leave its numbers as they are, to the bit, so the rows it is
    computed beside do not matter. Positions that no row here can see are not read at all.
    """
    BLOCK_DIM: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_DIM)
    ones = tl.full([TILE, 16], 1.0, q.dtype)
    acc = tl.zeros([q.shape[0], BLOCK_DIM], tl.float32)
    # Weights are totalled by the matrix unit, in the order of the positions; tl.sum would
    # add in an order that follows the query tile.
    totals = tl.zeros([q.shape[0], 16], tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    stop = tl.minimum((split + 1) * SPLIT, tl.max(position) + 1).to(tl.int32)
    for begin in tl.range(split * SPLIT, stop, TILE):
        at = begin + tl.arange(0, TILE)
        block = tl.load(table + at // BLOCK_SIZE, mask=at < stop, other=0)
        offset = block * block_stride + (at % BLOCK_SIZE) * position_stride
        kv_mask = (at < stop)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + offset[:, None] + dim[None, :], mask=kv_mask, other=0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        visible = at[None, :] <= position[:, None]
        if SLIDING_WINDOW:
            visible = visible & (at[None, :] > position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2((scores - base[:, None]) * scale).to(q.dtype)
        shrink = tl.exp2((peak - base) * scale)
        v = tl.load(values + offset[:, None] + dim[None, :], mask=kv_mask, other=0)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        totals = tl.dot(weights, ones, totals * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, tl.max(totals, 1), peak


@triton.jit
def _merged(acc, total, peak, part, scale):
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
    acc = tl.fma(acc, old[:, None], acc_split * new[:, None])
    return acc, total, new_peak


@triton.jit
def _normalised(acc, total):
    # Only queries that take no part have no weight; they are not stored.
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["max_splits"])
def _merge_kernel(
    sums,  # [num_rows, heads, max_splits, HEAD_DIM] fp32
    stats,  # [num_rows, heads, max_splits, 2] fp32: total weight, highest score
    positions,  # [num_rows] int64
    out,  # [num_rows, heads, HEAD_DIM]
    max_splits,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    index = query + tl.arange(0, 1)
    dim = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([1, BLOCK_DIM], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    position = tl.load(positions + tl.program_id(0) + tl.arange(0, 1))
    first, last = _splits(position, SPLIT, SLIDING_WINDOW)
    for split in range(first, last + 1, 4):
        # Four loads in flight, then four merges in order; absent splits change nothing.
        part_0 = _partial(sums, stats, index, split, last, max_splits, dim, HEAD_DIM)
        part_1 = _partial(sums, stats, index, split + 1, last, max_splits, dim, HEAD_DIM)
        part_2 = _partial(sums, stats, index, split + 2, last, max_splits, dim, HEAD_DIM)
        part_3 = _partial(sums, stats, index, split + 3, last, max_splits, dim, HEAD_DIM)
        acc, total, peak = _merged(acc, total, peak, part_0, scale)
        acc, total, peak = _merged(acc, total, peak, part_1, scale)
        acc, total, peak = _merged(acc, total, peak, part_2, scale)
        acc, total, peak = _merged(acc, total, peak, part_3, scale)
    tl.store(
        out + index[:, None] * HEAD_DIM + dim[None, :],
        _normalised(acc, total).to(out.dtype.element_ty),
        mask=(dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _partial(sums, stats, index, split, last, max_splits, dim, HEAD_DIM: tl.constexpr):
    at = index * max_splits + split
    mask = (split <= last) & (dim < HEAD_DIM)[None, :]
    acc = tl.load(sums + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0)
    total = tl.load(stats + at * 2, mask=split <= last, other=0)
    peak = tl.load(stats + at * 2 + 1, mask=split <= last, other=float("-inf"))
    return acc, total, peak

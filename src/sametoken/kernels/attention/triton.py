# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Causal attention over paged KV on a GPU, with one arithmetic for every kind of row.

A row's KV is cut into splits of a fixed size, anchored at position 0. Each split gives a
partial result (weighted values, their total weight, the highest score), and partial results
are merged in the order of the splits. Whether one program walks the splits of its rows
("walk") or many programs take one split each and a second kernel merges ("spread") is a
matter of speed: both run ``arithmetic``, so the bits agree, for every query tile
and every window (tests/gpu/test_attention_gpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.attention.arithmetic import (
    merged,
    next_turn,
    normalised,
    of_turn,
    split_range,
    split_result,
)
from sametoken.kernels.attention.tiles import tile_queries, tile_rows
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV
from sametoken.kernels.overlap import overlapped, wait_for_earlier

#: Positions per split: part of a row's arithmetic, so one constant for the whole engine.
SPLIT = 128

#: Programs that keep the chip busy, two per multiprocessor; from there on rows walk.
BUSY_PROGRAMS = 264

#: Bytes of partial results that a launch may need at most; beyond, rows walk.
MAX_PARTIAL_BYTES = 1 << 29

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How a launch is cut up. Only ``split`` and ``tile`` take part in a row's bits.

    Attributes:
        spread: one program per split and a merging kernel, rather than one that walks.
        block_queries: rows x query heads per program, a power of two from 16.
        num_warps: warps per program.
        num_stages: depth of the load pipeline; odd, for block table and KV share it.
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
    if num_rows % (window or 1):
        raise InvariantError(f"{num_rows} rows are not made of windows of {window}")
    out = q.new_empty(num_rows, shape.num_heads * shape.head_dim)
    if not num_rows:
        return out
    config = config or choose(num_rows, shape, window, max_seq_len, q.dtype)
    if window is None and config.spread:
        raise InvariantError("attention over ragged rows has the walk form only")
    assert q.is_contiguous()
    assert kv.keys.stride() == kv.values.stride()
    assert kv.keys.stride(3) == 1
    assert rows.block_table.stride(1) == 1
    assert config.split % config.tile == 0
    _launch(q, shape, rows, kv, out, window, max_seq_len, sliding_window or 0, config)
    return out


def choose(
    num_rows: int, shape: AttentionShape, window: int | None, max_seq_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """How to cut up a launch of at least one row, from its shapes."""
    group = shape.num_heads // shape.num_kv_heads
    width = window or num_rows
    largest = 16 if dtype == torch.float32 else 32
    queries = min(largest, triton.next_power_of_2(width * group))
    queries = max(16, triton.next_power_of_2(group), queries)
    tiles = num_rows // width * triton.cdiv(width, queries // group)
    busy = tiles * shape.num_kv_heads >= BUSY_PROGRAMS
    partial_bytes = 4 * num_rows * shape.q_size * triton.cdiv(max_seq_len, SPLIT)
    fits = partial_bytes <= MAX_PARTIAL_BYTES
    spread = window is not None and not busy and max_seq_len > SPLIT and fits
    if spread:
        return AttentionConfig(True, queries, 4, num_stages=5 if shape.head_dim <= 128 else 3)
    # Walking programs fill the chip by themselves: small tiles do with half the warps.
    small = queries == 16 and dtype != torch.float32
    return AttentionConfig(False, queries, 2 if small else 4, num_stages=2 if small else 3)


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
    scale = shape.scale * LOG2_E
    inputs = (
        q,
        kv.keys,
        kv.values,
        rows.positions,
        rows.slots,
        rows.block_table,
        width,
        rows.block_table.stride(0),
        kv.keys.stride(0),
        kv.keys.stride(1),
        kv.keys.stride(2),
        scale,
    )
    constants = {
        "GROUP": group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(shape.head_dim)),
        "BLOCK_SIZE": kv.keys.shape[2],
        "BLOCK_QUERIES": config.block_queries,
        "SPLIT": config.split,
        "TILE": config.tile,
        "SLIDING_WINDOW": sliding_window,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **overlapped(q),
    }
    if not config.spread:
        grid = (tiles, shape.num_kv_heads)
        _walk_kernel[grid](*inputs, out, RAGGED=window is None, **constants)
        return
    max_splits = triton.cdiv(max_seq_len, config.split)
    lanes = min(max_splits, triton.cdiv(2 * BUSY_PROGRAMS, tiles * shape.num_kv_heads))
    size = (num_rows, shape.num_heads, max_splits)
    sums = q.new_empty(*size, shape.head_dim, dtype=torch.float32)
    stats = q.new_empty(*size, 2, dtype=torch.float32)
    _spread_kernel[(tiles, shape.num_kv_heads, lanes)](
        *inputs, sums, stats, max_splits, **constants
    )
    _merge_kernel[(num_rows, shape.num_heads)](
        sums,
        stats,
        rows.positions,
        out,
        max_splits,
        scale,
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=constants["BLOCK_DIM"],
        SPLIT=config.split,
        SLIDING_WINDOW=sliding_window,
        num_warps=1,
        **overlapped(q),
    )


@triton.jit(do_not_specialize=["width"])
def _walk_kernel(
    q,  # [num_rows, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    block_table,  # [num_slots, max_blocks] int64
    width,  # rows per window; all rows if RAGGED
    table_stride,
    block_stride,
    head_stride,
    position_stride,
    scale,
    out,  # [num_rows, heads, HEAD_DIM]
    RAGGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    first, stop = tile_rows(width, BLOCK_QUERIES // GROUP)
    row, present, position, index, mask = tile_queries(
        positions, first, stop, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES
    )
    dim = tl.arange(0, BLOCK_DIM)[:, None]
    at = index[None, :] * HEAD_DIM + dim
    q_tile = tl.load(q + at, mask=mask, other=0)
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride

    owner = tl.load(slots + row)
    turn = tl.min(position) * 0 - 1
    while turn <= tl.max(position):
        acc = tl.zeros([BLOCK_DIM, BLOCK_QUERIES], tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        of_now = of_turn(turn, position)
        start = first
        while start < stop:
            slot = tl.load(slots + start)
            following = stop
            if RAGGED:
                others = present & (row > start) & (owner != slot)
                following = tl.min(tl.where(others, row, stop))
            mine = present & (row >= start) & (row < following)
            limit = tl.where(mine, of_now, -1)
            table = block_table + slot * table_stride
            first_split, last_split = split_range(limit, SPLIT, SLIDING_WINDOW)
            for split in range(first_split, last_split + 1):
                part = split_result(
                    q_tile, limit, split, table, keys, values, block_stride, position_stride,
                    scale, HEAD_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW,
                )  # fmt: skip
                result = merged(acc, total, peak, part, scale)
                acc = tl.where(mine[None, :], result[0], acc)
                total = tl.where(mine, result[1], total)
                peak = tl.where(mine, result[2], peak)
            start = following
        result = normalised(acc, total).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=mask & (of_now >= 0)[None, :])
        turn = next_turn(turn, position, acc)


@triton.jit(do_not_specialize=["width", "max_splits"])
def _spread_kernel(
    q,  # as for _walk_kernel
    keys,
    values,
    positions,
    slots,
    block_table,
    width,
    table_stride,
    block_stride,
    head_stride,
    position_stride,
    scale,
    sums,  # [num_rows, heads, max_splits, HEAD_DIM] fp32
    stats,  # [num_rows, heads, max_splits, 2] fp32: total weight, highest score
    max_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    first, stop = tile_rows(width, BLOCK_QUERIES // GROUP)
    _, _, position, index, mask = tile_queries(
        positions, first, stop, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES
    )
    dim = tl.arange(0, BLOCK_DIM)[:, None]
    q_tile = tl.load(q + index[None, :] * HEAD_DIM + dim, mask=mask, other=0)
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride
    table = block_table + tl.load(slots + first) * table_stride
    first_split, last_split = split_range(position, SPLIT, SLIDING_WINDOW)
    split = first_split + tl.program_id(2)
    turn = tl.min(position) * 0 - 1
    while split <= last_split:
        of_now = of_turn(turn, position)
        acc, total, peak = split_result(
            q_tile, of_now, split, table, keys, values, block_stride, position_stride,
            scale, HEAD_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW,
        )  # fmt: skip
        part = index * max_splits + split
        stored = of_now >= 0
        tl.store(sums + part[None, :] * HEAD_DIM + dim, acc, mask=mask & stored[None, :])
        tl.store(stats + part * 2, total, mask=stored)
        tl.store(stats + part * 2 + 1, peak, mask=stored)
        turn = next_turn(turn, position, acc)
        finished = turn > tl.max(position)
        turn = tl.where(finished, -1, turn)
        split = tl.where(finished, split + tl.num_programs(2), split)


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
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    query = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    index = query + tl.arange(0, 1)
    dim = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([BLOCK_DIM, 1], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    position = tl.load(positions + tl.program_id(0) + tl.arange(0, 1))
    first, last = split_range(position, SPLIT, SLIDING_WINDOW)
    for split in range(first, last + 1, 4):
        # Four loads in flight, then four merges in order; absent splits change nothing.
        part_0 = _partial(sums, stats, index, split, last, max_splits, dim, HEAD_DIM)
        part_1 = _partial(sums, stats, index, split + 1, last, max_splits, dim, HEAD_DIM)
        part_2 = _partial(sums, stats, index, split + 2, last, max_splits, dim, HEAD_DIM)
        part_3 = _partial(sums, stats, index, split + 3, last, max_splits, dim, HEAD_DIM)
        acc, total, peak = merged(acc, total, peak, part_0, scale)
        acc, total, peak = merged(acc, total, peak, part_1, scale)
        acc, total, peak = merged(acc, total, peak, part_2, scale)
        acc, total, peak = merged(acc, total, peak, part_3, scale)
    tl.store(
        out + index[None, :] * HEAD_DIM + dim[:, None],
        normalised(acc, total).to(out.dtype.element_ty),
        mask=(dim < HEAD_DIM)[:, None],
    )


@triton.jit
def _partial(sums, stats, index, split, last, max_splits, dim, HEAD_DIM: tl.constexpr):
    at = index * max_splits + split
    mask = (split <= last) & (dim < HEAD_DIM)[:, None]
    acc = tl.load(sums + at[None, :] * HEAD_DIM + dim[:, None], mask=mask, other=0)
    total = tl.load(stats + at * 2, mask=split <= last, other=0)
    peak = tl.load(stats + at * 2 + 1, mask=split <= last, other=float("-inf"))
    return acc, total, peak

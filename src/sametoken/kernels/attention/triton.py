# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Causal attention over paged KV on a GPU, with one arithmetic for every kind of row.

A row's KV is cut into splits of a fixed size, anchored at position 0. Each split gives a
partial result (weighted values, their total weight, the highest score), and partial results
are merged in the order of the splits. Whether one program walks the splits of its rows
("walk"), or many programs take one split each and a second kernel merges ("spread"), is a
matter of speed: both run ``arithmetic``, so the bits agree, for every query tile and every
window (tests/gpu/test_attention_gpu.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.attention.arithmetic import (
    empty_split,
    next_turn,
    normalised,
    of_turn,
    per_element,
    per_query,
    split_range,
)
from sametoken.kernels.attention.splits import ask_for_split, merged_parts, split_result, walked
from sametoken.kernels.attention.tiles import tile_queries, tile_rows
from sametoken.kernels.attention.tuning import SPLIT, AttentionConfig, Form, choose
from sametoken.kernels.interface import AttentionRows, AttentionShape, LayerKV
from sametoken.kernels.overlap import overlapped, release_next, wait

__all__ = ["SPLIT", "AttentionConfig", "Form", "attention", "choose"]

LOG2_E = 1.4426950408889634


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
        InvariantError: a form of spread splits without a window, or rows that windows do
            not divide.
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
    if window is None and config.form != "walk":
        raise InvariantError("attention over ragged rows has the walk form only")
    assert q.is_contiguous()
    assert kv.keys.stride() == kv.values.stride()
    assert kv.keys.stride()[2:] == (shape.head_dim, 1)
    assert rows.block_table.stride(1) == 1
    assert config.split % config.tile == 0
    _launch(q, shape, rows, kv, out, window, max_seq_len, sliding_window or 0, config)
    return out


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
    tiles = config.num_tiles(num_rows, width, group)
    scale = shape.scale * LOG2_E
    strides = (rows.block_table.stride(0), *kv.keys.stride()[:2])
    where = (rows.positions, rows.slots, rows.block_table, width)
    inputs = (q, kv.keys, kv.values, *where, *strides, scale)
    sizes = {
        "HEAD_DIM": shape.head_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(shape.head_dim)),
        "SPLIT": config.split,
        "SLIDING_WINDOW": sliding_window,
        **overlapped(q),
    }
    constants = sizes | {
        "GROUP": group,
        "BLOCK_SIZE": kv.keys.shape[2],
        "BLOCK_QUERIES": config.block_queries,
        "TILE": config.tile,
        "KV_LEFT": config.kv_left,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.form == "walk":
        _walk_kernel[tiles, shape.num_kv_heads](*inputs, out, RAGGED=window is None, **constants)
        return
    max_splits = triton.cdiv(max_seq_len, config.split)
    lanes = config.num_lanes(tiles * shape.num_kv_heads, max_splits)
    size = (num_rows, shape.num_heads, max_splits)
    sums = q.new_empty(*size, shape.head_dim, dtype=torch.float32)
    stats = q.new_empty(*size, 2, dtype=torch.float32)
    _spread_kernel[tiles, shape.num_kv_heads, lanes](*inputs, sums, stats, max_splits, **constants)
    _merge_kernel[num_rows, shape.num_heads](
        sums, stats, rows.positions, out, max_splits, scale, num_warps=1, **sizes
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
    KV_LEFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    first, stop = tile_rows(width, BLOCK_QUERIES // GROUP)
    row, present, position, _index, first_index, at, mask = tile_queries(
        positions, first, stop, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES, KV_LEFT
    )
    wait(OVERLAP)
    q_tile = tl.load(q + first_index * HEAD_DIM + at, mask=mask, other=0)
    out += first_index * HEAD_DIM
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride

    if RAGGED:
        owner = tl.load(slots + row)
    turn = tl.min(position) * 0 - 1
    while turn <= tl.max(position):
        of_now = of_turn(turn, position)
        if RAGGED:
            acc, _totals, _peak = empty_split(BLOCK_DIM, BLOCK_QUERIES, KV_LEFT)
            total = tl.zeros([BLOCK_QUERIES], tl.float32)
            start = first
            while start < stop:
                slot = tl.load(slots + start)
                others = present & (row > start) & (owner != slot)
                following = tl.min(tl.where(others, row, stop))
                mine = present & (row >= start) & (row < following)
                result = walked(
                    q_tile, tl.where(mine, of_now, -1), block_table + slot * table_stride,
                    keys, values, block_stride, scale,
                    HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW, KV_LEFT,
                )  # fmt: skip
                acc = tl.where(per_query(mine, KV_LEFT), result[0], acc)
                total = tl.where(mine, result[1], total)
                start = following
        else:
            acc, total = walked(
                q_tile, of_now, block_table + tl.load(slots + first) * table_stride,
                keys, values, block_stride, scale,
                HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW, KV_LEFT,
            )  # fmt: skip
        result = normalised(acc, total, KV_LEFT).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=mask & per_query(of_now >= 0, KV_LEFT))
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
    KV_LEFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    first, stop = tile_rows(width, BLOCK_QUERIES // GROUP)
    _row, _present, position, index, first_index, at, mask = tile_queries(
        positions, first, stop, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES, KV_LEFT
    )
    sums += first_index * max_splits * HEAD_DIM
    stats += first_index * max_splits * 2
    dim = per_element(tl.arange(0, BLOCK_DIM), KV_LEFT)
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride
    table = block_table + tl.load(slots + first) * table_stride
    first_split, last_split = split_range(position, SPLIT, SLIDING_WINDOW)
    split = first_split + tl.program_id(2)
    if split <= last_split:
        ask_for_split(
            split, tl.max(position), table, keys, values, block_stride,
            HEAD_DIM, BLOCK_SIZE, SPLIT, OVERLAP,
        )  # fmt: skip
    wait(OVERLAP)
    q_tile = tl.load(q + first_index * HEAD_DIM + at, mask=mask, other=0)
    turn = tl.min(position) * 0 - 1
    while split <= last_split:
        of_now = of_turn(turn, position)
        acc, total, peak = split_result(
            q_tile, of_now, split, table, keys, values, block_stride, scale,
            HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        part = index * max_splits + split
        stored = of_now >= 0
        part_at = per_query(part, KV_LEFT) * HEAD_DIM + dim
        tl.store(sums + part_at, acc, mask=mask & per_query(stored, KV_LEFT))
        tl.store(stats + part * 2, total, mask=stored)
        tl.store(stats + part * 2 + 1, peak, mask=stored)
        turn = next_turn(turn, position, acc)
        finished = turn > tl.max(position)
        turn = tl.where(finished, -1, turn)
        split = tl.where(finished, split + tl.num_programs(2), split)


@triton.jit(do_not_specialize=["max_splits"])
def _merge_kernel(
    sums,  # as for _spread_kernel
    stats,
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
    release_next(OVERLAP)
    query = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    sums += query * max_splits * HEAD_DIM
    stats += query * max_splits * 2
    position = tl.load(positions + tl.program_id(0) + tl.arange(0, 1)).to(tl.int32)
    wait(OVERLAP)
    acc, total = merged_parts(
        sums, stats, position, scale, HEAD_DIM, BLOCK_DIM, SPLIT, SLIDING_WINDOW
    )
    dim = tl.arange(0, BLOCK_DIM)[:, None]
    result = normalised(acc, total, True).to(out.dtype.element_ty)
    tl.store(out + query * HEAD_DIM + dim, result, mask=dim < HEAD_DIM)

"""Causal paged attention on a GPU, with the same arithmetic for every kind of row.

A row's KV is divided into splits of a fixed size, anchored at position 0. Each split gives a
partial result (weighted values, their total weight, the maximum score), and partial results are
merged in the order of the splits. Either one program runs all splits of its rows ("sequential"),
or several programs take some each and a second kernel merges ("split_kv", as in flash decoding).
Both run ``arithmetic``, so the bits agree for every query tile and division into runs
(tests/gpu/test_attention_gpu.py).
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionShape, LayerKV, QueryRows, RunGroup
from sametoken.ops.hopper import shared_memory
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.arithmetic import (
    isolate,
    next_isolated,
    normalised,
    per_element,
    per_query,
    scaled,
    split_range,
    tile_queries,
    with_sink,
)
from sametoken.ops.model.attention.kv_triton import as_bytes
from sametoken.ops.model.attention.scratch import Launches, Scratch, most_bytes, of_splits
from sametoken.ops.model.attention.splits import (
    merged_parts,
    prefetch_split,
    sequential_result,
    split_result,
    store_output,
)
from sametoken.ops.model.attention.tiles import jit_over_runs, tile_rows, tiles_of
from sametoken.ops.model.attention.tuning import (
    LOG2_E,
    SPLIT,
    AttentionConfig,
    Form,
    choose,
    fitted,
)
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, gdc_wait_once, pdl_options

__all__ = ["SPLIT", "AttentionConfig", "Form", "attention", "choose"]


def attention(
    q: Tensor,
    shape: AttentionShape,
    rows: QueryRows,
    kv: LayerKV,
    sinks: Tensor | None = None,
    *,
    max_seq_len: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of [T, H, D] queries over their slots' KV: [T, H * D] in q's dtype.

    Short and long runs are launched separately, each with a configuration for its sizes. Launches
    depend on shapes and host arguments only, so they can be captured. Rows after the last run are
    not written.

    Args:
        q: [T, H, D], contiguous, bf16, fp16 or fp32.
        shape: head counts and the sliding window.
        rows: positions and slots of the rows, with their runs.
        kv: the layer's KV, both tensors contiguous within a block and of equal strides; of q's
            dtype, or float8 e4m3.
        sinks: [H] fp32, a logit of each head without a value; None: there are none.
        max_seq_len: upper bound of positions, exclusive; by default the block table's capacity.
        config: launch configuration; chosen from the shapes by default.

    Raises:
        InvariantError: rows without runs, or fewer rows than even runs have.
    """
    num_rows, runs = q.shape[0], rows.runs
    if runs is None:
        raise InvariantError("attention was given rows without runs", "set AttentionRows.runs")
    if runs.starts is None and runs.count * runs.max_rows > num_rows:
        raise InvariantError(f"{runs.count} runs of {runs.max_rows} are more than {num_rows} rows")
    capacity = rows.block_table.shape[1] * kv.keys.shape[2]
    max_seq_len = capacity if max_seq_len is None else min(max_seq_len, capacity)
    assert q.is_contiguous()
    assert kv.keys.stride() == kv.values.stride()
    assert kv.keys.stride()[2:] == (shape.head_dim, 1)
    assert rows.block_table.stride(1) == 1
    out = q.new_empty(num_rows, shape.num_heads * shape.head_dim)
    for group in runs.groups if num_rows else ():
        chosen = config or choose(group.num_runs, group.max_rows, shape, max_seq_len, q.dtype)
        chosen = fitted(chosen, shape.num_heads // shape.num_kv_heads, shared_memory(q))
        assert chosen.split % chosen.tile == 0
        _launch(q, shape, rows, kv, sinks, out, group, max_seq_len, chosen)
    return out


def scratch_of(
    group: RunGroup, shape: AttentionShape, max_seq_len: int, config: AttentionConfig
) -> Scratch:
    """Memory of a launch beside its result."""
    if config.form == "sequential":
        return Scratch(0)
    splits = cdiv(max_seq_len, config.split)
    return of_splits(group.num_runs * group.max_rows, shape.num_heads, splits, shape.head_dim)


def most_scratch(shape: AttentionShape, dtype: torch.dtype, launches: Launches) -> int:
    """The most bytes of ``scratch_of`` in an engine."""
    max_seq_len = launches.max_seq_len

    def of_launch(num_runs: int, width: int, num_rows: int) -> Scratch:
        config = choose(num_runs, width, shape, max_seq_len, dtype)
        return scratch_of(RunGroup(0, num_runs, width), shape, max_seq_len, config)

    place = of_splits(1, shape.num_heads, cdiv(max_seq_len, SPLIT), shape.head_dim)
    return most_bytes(of_launch, place, launches)


def _launch(
    q: Tensor,
    shape: AttentionShape,
    rows: QueryRows,
    kv: LayerKV,
    sinks: Tensor | None,
    out: Tensor,
    group: RunGroup,
    max_seq_len: int,
    config: AttentionConfig,
) -> None:
    assert rows.runs is not None
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    tiles = tiles_of(rows, group, config.block_queries // heads_per_kv)
    scale = shape.scale * LOG2_E
    strides = (rows.block_table.stride(0), *kv.keys.stride()[:2])
    where = (rows.positions, rows.slots, rows.runs.starts, *group)
    memory = (as_bytes(kv.keys), as_bytes(kv.values))
    inputs = (q, *memory, *where, rows.block_table, *strides, scale, kv.k_scales)
    sizes = {
        "GROUP": heads_per_kv,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_DIM": max(16, next_power_of_2(shape.head_dim)),
        "SPLIT": config.split,
        "SLIDING_WINDOW": shape.sliding_window or 0,
        "BLOCK_RUNS": tiles.block_runs,
        **pdl_options(q),
    }
    constants = sizes | {
        "BLOCK_SIZE": kv.keys.shape[2],
        "BLOCK_QUERIES": config.block_queries,
        "TILE": config.tile,
        "KV_LEFT": config.kv_left,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.form == "sequential":
        _sequential_kernel[tiles.count, shape.num_kv_heads](
            *inputs, kv.v_scales, sinks, out, **constants
        )
        return
    max_splits = cdiv(max_seq_len, config.split)
    programs = min(max_splits, cdiv(config.programs, tiles.count * shape.num_kv_heads))
    scratch = scratch_of(group, shape, max_seq_len, config)
    sums = q.new_empty(scratch.sums, dtype=torch.float32)
    stats = q.new_empty(scratch.stats, dtype=torch.float32)
    _split_kv_kernel[tiles.count, shape.num_kv_heads, programs](
        *inputs, sums, stats, max_splits, **constants
    )
    _merge_kernel[tiles.merged, shape.num_heads](
        sums,
        stats,
        *where,
        sinks,
        out,
        max_splits,
        scale,
        kv.k_scales,
        kv.v_scales,
        num_warps=1,
        **sizes,
    )


@jit_over_runs
def _sequential_kernel(
    q,  # [num_rows, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM], float8 as bytes
    values,
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    starts,  # [runs + 1] int64, or None: every run has ``width`` rows
    first_run,  # of the launch
    num_runs,
    width,  # the most rows of its runs
    block_table,  # [num_slots, max_blocks] int64
    table_stride,
    block_stride,
    head_stride,
    scale,
    k_scales,  # [kv_heads] fp32, or None
    v_scales,  # [kv_heads] fp32, or None
    sinks,  # [heads] fp32, or None
    out,  # [num_rows, heads, HEAD_DIM]
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    begin, first, stop, _place = tile_rows(
        starts, first_run, num_runs, width, BLOCK_QUERIES // GROUP, BLOCK_RUNS
    )
    if starts is not None and first >= stop:
        gdc_wait_once(PDL)
        return
    slot = tl.load(slots + begin)
    position, _index, first_index, at, mask = tile_queries(
        positions, slots, slot, starts, first, stop,
        GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES, KV_LEFT,
    )  # fmt: skip
    kv_head = tl.program_id(1)
    scale = scaled(scale, k_scales, kv_head)
    gdc_wait(PDL)
    q_tile = tl.load(q + first_index * HEAD_DIM + at, mask=mask, other=0)
    out += first_index * HEAD_DIM
    keys += kv_head * head_stride
    values += kv_head * head_stride
    memory = (block_table + slot * table_stride, keys, values, block_stride)

    isolated = tl.min(position) * 0 - 1
    while isolated <= tl.max(position):
        active = isolate(isolated, position)
        acc, total, peak = sequential_result(
            q_tile, active, memory, scale,
            HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        if sinks is not None:
            head = kv_head * GROUP + tl.arange(0, BLOCK_QUERIES) % GROUP
            acc, total = with_sink(acc, total, peak, tl.load(sinks + head), scale, KV_LEFT)
        result = scaled(normalised(acc, total, KV_LEFT), v_scales, kv_head)
        result = result.to(out.dtype.element_ty)
        # Dead rows are all 0, so a MoE layer routes them all to the same experts.
        stored = (isolated < 0) | (active >= 0)
        tl.store(out + at, result, mask=mask & per_query(stored, KV_LEFT))
        isolated = next_isolated(isolated, position, acc)


@jit_over_runs
def _split_kv_kernel(
    q,  # as for _sequential_kernel
    keys,
    values,
    positions,
    slots,
    starts,
    first_run,
    num_runs,
    width,
    block_table,
    table_stride,
    block_stride,
    head_stride,
    scale,
    k_scales,
    sums,  # [places, heads, max_splits, HEAD_DIM] fp32
    stats,  # [places, heads, max_splits, 2] fp32: total weight, maximum score
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
    BLOCK_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    begin, first, stop, place = tile_rows(
        starts, first_run, num_runs, width, BLOCK_QUERIES // GROUP, BLOCK_RUNS
    )
    if starts is not None and first >= stop:
        gdc_wait_once(PDL)
        return
    slot = tl.load(slots + begin)
    position, index, first_index, at, mask = tile_queries(
        positions, slots, slot, starts, first, stop,
        GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_QUERIES, KV_LEFT,
    )  # fmt: skip
    first_part = first_index + (place - first).to(tl.int64) * tl.num_programs(1) * GROUP
    sums += first_part * max_splits * HEAD_DIM
    stats += first_part * max_splits * 2
    dim = per_element(tl.arange(0, BLOCK_DIM), KV_LEFT)
    scale = scaled(scale, k_scales, tl.program_id(1))
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride
    memory = (block_table + slot * table_stride, keys, values, block_stride)
    first_split, last_split = split_range(position, SPLIT, SLIDING_WINDOW)
    split = first_split + tl.program_id(2)
    if split <= last_split:
        prefetch_split(split, tl.max(position), memory, HEAD_DIM, BLOCK_SIZE, SPLIT, PDL)
    gdc_wait(PDL)
    q_tile = tl.load(q + first_index * HEAD_DIM + at, mask=mask, other=0)
    isolated = tl.min(position) * 0 - 1
    while split <= last_split:
        active = isolate(isolated, position)
        acc, total, peak = split_result(
            q_tile, active, split, memory, scale,
            HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, SPLIT, TILE, SLIDING_WINDOW, KV_LEFT,
        )  # fmt: skip
        part = index * max_splits + split
        stored = active >= 0
        part_at = per_query(part, KV_LEFT) * HEAD_DIM + dim
        tl.store(sums + part_at, acc, mask=mask & per_query(stored, KV_LEFT))
        tl.store(stats + part * 2, total, mask=stored)
        tl.store(stats + part * 2 + 1, peak, mask=stored)
        isolated = next_isolated(isolated, position, acc)
        finished = isolated > tl.max(position)
        isolated = tl.where(finished, -1, isolated)
        split = tl.where(finished, split + tl.num_programs(2), split)


@jit_over_runs
def _merge_kernel(
    sums,  # as for _split_kv_kernel
    stats,
    positions,
    slots,
    starts,
    first_run,
    num_runs,
    width,
    sinks,  # as for _sequential_kernel
    out,  # [num_rows, heads, HEAD_DIM]
    max_splits,
    scale,
    k_scales,
    v_scales,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    begin, row, stop, place = tile_rows(starts, first_run, num_runs, width, 1, BLOCK_RUNS)
    if starts is not None and row >= stop:
        gdc_wait_once(PDL)
        return
    heads, head = tl.num_programs(1), tl.program_id(1)
    part = place.to(tl.int64) * heads + head
    sums += part * max_splits * HEAD_DIM
    stats += part * max_splits * 2
    position = tl.load(positions + row + tl.arange(0, 1)).to(tl.int32)
    dead = None
    if starts is not None:
        dead = tl.load(slots + row) != tl.load(slots + begin)
    scale = scaled(scale, k_scales, head // GROUP)
    gdc_wait(PDL)
    first_split, last_split = split_range(position, SPLIT, SLIDING_WINDOW)
    parts = merged_parts(sums, stats, first_split, last_split, scale, HEAD_DIM, BLOCK_DIM)
    acc, total, peak = parts
    if sinks is not None:
        sink = tl.load(sinks + head + tl.arange(0, 1))
        acc, total = with_sink(acc, total, peak, sink, scale, True)
    at = row.to(tl.int64) * heads + head
    store_output(out, at, acc, total, v_scales, head // GROUP, dead, HEAD_DIM)

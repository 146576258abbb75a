"""Causal attention over latent vectors on a GPU, with the same arithmetic for every kind of row.

The heads of a row, and the rows of a window, lie side by side in a query tile: they read the same
vectors. Splits follow ``schedule``, by position. Either one program computes all splits of its
queries and merges each into their running result, in memory because two results of 64 x 512 fp32
do not fit in registers ("sequential"); or several programs take some splits each and a second
kernel merges ("split_kv"). Both merge the same partial results in the same order.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.backend import QueryRows, RunGroup
from sametoken.ops.hopper import shared_memory
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.arithmetic import (
    accumulated,
    block_of,
    empty_split,
    merged,
    normalised,
    per_element,
    per_query,
    places,
    scaled,
    softmax,
    tile_queries,
    total_of,
)
from sametoken.ops.model.attention.kv_triton import as_bytes, as_read
from sametoken.ops.model.attention.schedule import LEVELS, begin_of, max_splits, split_of
from sametoken.ops.model.attention.splits import merged_parts, store_output
from sametoken.ops.model.attention.tiles import jit_over_runs, tile_rows, tiles_of
from sametoken.ops.model.attention.tuning import LOG2_E
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.latent_attention.tuning import (
    LatentConfig,
    choose,
    fitted,
    heads_per_tile,
    scratch_of,
)
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, gdc_wait_once, pdl_options


def attention(
    q: Tensor,
    scale: float,
    rows: QueryRows,
    memory: LayerLatent,
    *,
    config: LatentConfig | None = None,
) -> Tensor:
    """Attention of [T, H, width] queries over their slots' vectors: [T, H, rank] in q's dtype.

    Launches depend on shapes and host arguments only, so they can be captured. Rows after the last
    run are not written.

    Args:
        q: contiguous, bf16, fp16 or fp32.
        scale: factor on the scores.
        rows: positions and slots of the rows, with their runs.
        memory: the layer's vectors, finite in their first ``rank`` elements; of q's dtype, or
            float8 e4m3.
        config: launch configuration; chosen from the shapes by default.

    Raises:
        InvariantError: rows without runs, or fewer rows than even runs have.
    """
    (num_rows, num_heads, width), runs = q.shape, rows.runs
    if runs is None:
        raise InvariantError("attention on a GPU needs the rows' runs")
    if runs.starts is None and runs.count * runs.max_rows > num_rows:
        raise InvariantError(f"{runs.count} runs of {runs.max_rows} are more than {num_rows} rows")
    max_seq_len = rows.block_table.shape[1] * memory.vectors.shape[1]
    assert q.is_contiguous()
    assert memory.vectors.shape[2] == width
    assert memory.vectors.is_contiguous()
    assert rows.block_table.stride(1) == 1
    out = q.new_empty(num_rows, num_heads, memory.rank)
    for group in runs.groups if num_rows else ():
        chosen = config or choose(group.num_runs, group.max_rows, num_heads, max_seq_len, q.dtype)
        chosen = fitted(chosen, shared_memory(q))
        assert LEVELS[0][1] % chosen.tile == 0
        _launch(q, scale, rows, memory, out, group, max_seq_len, chosen)
    return out


def _launch(
    q: Tensor,
    scale: float,
    rows: QueryRows,
    memory: LayerLatent,
    out: Tensor,
    runs: RunGroup,
    max_seq_len: int,
    config: LatentConfig,
) -> None:
    assert rows.runs is not None
    num_heads, rank, rope_dim = q.shape[1], memory.rank, q.shape[2] - memory.rank
    group = heads_per_tile(num_heads, config.block_queries)
    tiles = tiles_of(rows, runs, config.block_queries // group)
    where = (rows.positions, rows.slots, rows.runs.starts, *runs)
    strides = (rows.block_table.stride(0), memory.vectors.stride(0))
    factors = (scale * LOG2_E, memory.scale)
    inputs = (q, as_bytes(memory.vectors), *where, rows.block_table, *strides, *factors)
    sizes = {
        "RANK": rank,
        "BLOCK_RANK": max(16, next_power_of_2(rank)),
        "BLOCK_RUNS": tiles.block_runs,
        **pdl_options(q),
    }
    constants = sizes | {
        "GROUP": group,
        "ROPE": rope_dim,
        "BLOCK_ROPE": max(16, next_power_of_2(rope_dim)),
        "BLOCK_SIZE": memory.vectors.shape[1],
        "BLOCK_QUERIES": config.block_queries,
        "TILE": config.tile,
        "KV_LEFT": config.kv_left,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    scratch = scratch_of(runs, len(q), (num_heads, rank), max_seq_len, config)
    if config.form == "sequential":
        running = q.new_empty(scratch.sums, dtype=torch.float32)
        _sequential_kernel[tiles.count, num_heads // group](*inputs, running, out, **constants)
        return
    splits, head_tiles = max_splits(max_seq_len), num_heads // group
    programs = min(splits, cdiv(config.programs, tiles.count * head_tiles))
    sums = q.new_empty(scratch.sums, dtype=torch.float32)
    stats = q.new_empty(scratch.stats, dtype=torch.float32)
    _split_kv_kernel[tiles.count, head_tiles, programs](*inputs, sums, stats, splits, **constants)
    _merge_kernel[tiles.merged, num_heads](
        sums, stats, *where, out, splits, *factors, num_warps=4, **sizes
    )


@triton.jit
def _queries(
    q, index, first_index,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    KV_LEFT: tl.constexpr,
):  # fmt: skip
    """Both parts of a tile's queries: BLOCK_RANK and BLOCK_ROPE elements, in acc's order."""
    start = q + first_index * (RANK + ROPE) + per_query(index, KV_LEFT) * (RANK + ROPE)
    dim = per_element(tl.arange(0, BLOCK_RANK), KV_LEFT)
    rope = per_element(tl.arange(0, BLOCK_ROPE), KV_LEFT)
    latent = tl.load(start + dim, mask=dim < RANK, other=0)
    return latent, tl.load(start + RANK + rope, mask=rope < ROPE, other=0)


@triton.jit
def _with_tile(
    state,  # of empty_split
    queries,  # of _queries
    position,  # [queries] int32, -1 for dead queries
    begin,  # the tile's first position
    stop,  # one past the last position that any query sees
    block,  # of block_of
    memory,  # the slot's blocks [max_blocks] int64, vectors, and the stride of their blocks
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """Online softmax: add one tile of positions to a split's state, as ``with_tile``."""
    acc, totals, peak = state
    q, q_rope = queries
    table, vectors, block_stride = memory
    AXIS: tl.constexpr = 0 if KV_LEFT else 1
    dim = tl.arange(0, q.shape[AXIS])[None, :]
    rope = tl.arange(0, q_rope.shape[AXIS])[None, :]
    at = begin + tl.arange(0, TILE)
    seen = at < stop
    start, offset = places(
        at, seen, begin, block, table, block_stride, RANK + ROPE, BLOCK_SIZE, TILE
    )
    vector = vectors + start + offset[:, None]
    latent = tl.load(vector + dim, mask=seen[:, None] & (dim < RANK), other=0)
    key = tl.load(vector + RANK + rope, mask=seen[:, None] & (rope < ROPE), other=0)
    latent, key = as_read(latent, q.dtype), as_read(key, q.dtype)
    if KV_LEFT:
        scores = tl.dot(latent, q, input_precision="ieee")
        scores = tl.dot(key, q_rope, scores, input_precision="ieee")
    else:
        scores = tl.dot(q, latent.T, input_precision="ieee")
        scores = tl.dot(q_rope, key.T, scores, input_precision="ieee")
    visible = per_element(at, KV_LEFT) <= per_query(position, KV_LEFT)
    scores = tl.where(visible, scores, float("-inf"))
    weights, shrink, peak = softmax(scores, peak, scale, q.dtype, KV_LEFT)
    values = latent.T if KV_LEFT else latent
    acc, totals = accumulated(acc * shrink, totals * shrink, weights, values, KV_LEFT)
    return acc, totals, peak


@triton.jit
def _split_result(
    queries,  # as for _with_tile
    position,
    split,
    memory,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """One split's weighted values, total weight and maximum score."""
    BLOCK_RANK: tl.constexpr = queries[0].shape[0 if KV_LEFT else 1]
    acc, totals, peak = empty_split(BLOCK_RANK, position.shape[0], KV_LEFT)
    begin = begin_of(split)
    stop = tl.minimum(begin_of(split + 1), tl.max(position) + 1)
    block = block_of(memory, begin, stop, BLOCK_SIZE)
    for at in tl.range(begin, stop, TILE):
        following = block_of(memory, at + TILE, stop, BLOCK_SIZE)
        acc, totals, peak = _with_tile(
            (acc, totals, peak), queries, position, at, stop, block, memory, scale,
            RANK, ROPE, BLOCK_SIZE, TILE, KV_LEFT,
        )  # fmt: skip
        block = following
    return acc, total_of(totals, KV_LEFT), peak


@jit_over_runs
def _sequential_kernel(
    q,  # [num_rows, heads, RANK + ROPE]
    vectors,  # [num_blocks, BLOCK_SIZE, RANK + ROPE], float8 as bytes
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    starts,  # [runs + 1] int64, or None: every run has ``width`` rows
    first_run,  # of the launch
    num_runs,
    width,  # the most rows of its runs
    block_table,  # [num_slots, max_blocks] int64
    table_stride,
    block_stride,
    scale,
    vector_scale,  # [1] fp32, or None
    running,  # [num_rows, heads, RANK] fp32, this kernel's own
    out,  # [num_rows, heads, RANK]
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
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
    position, index, first_index, at, mask = tile_queries(
        positions, slots, slot, starts, first, stop, GROUP, RANK, BLOCK_RANK, BLOCK_QUERIES, KV_LEFT
    )
    scale = scaled(scale, vector_scale, 0)
    gdc_wait(PDL)
    queries = _queries(q, index, first_index, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, KV_LEFT)
    running += first_index * RANK
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    highest = tl.max(position)
    for split in tl.range(0, tl.where(highest < 0, 0, split_of(highest) + 1)):
        part = _split_result(
            queries, position, split, (block_table + slot * table_stride, vectors, block_stride),
            scale, RANK, ROPE, BLOCK_SIZE, TILE, KV_LEFT,
        )  # fmt: skip
        sums = tl.load(running + at, mask=mask & (split > 0), other=0.0)
        sums, weight, top = merged(sums, weight, top, part, scale, KV_LEFT)
        tl.store(running + at, sums, mask=mask)
        # Other threads of the program may load it next.
        tl.debug_barrier()
    sums = tl.load(running + at, mask=mask & (highest >= 0), other=0.0)
    # Dead rows are all 0, so a MoE layer routes them all to the same experts.
    result = scaled(normalised(sums, weight, KV_LEFT), vector_scale, 0)
    tl.store(out + first_index * RANK + at, result.to(out.dtype.element_ty), mask=mask)


@jit_over_runs
def _split_kv_kernel(
    q,  # as for _sequential_kernel
    vectors,
    positions,
    slots,
    starts,
    first_run,
    num_runs,
    width,
    block_table,
    table_stride,
    block_stride,
    scale,
    vector_scale,
    sums,  # [places, heads, max_splits, RANK] fp32
    stats,  # [places, heads, max_splits, 2] fp32: total weight, maximum score
    max_splits,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
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
    position, index, first_index, _at, mask = tile_queries(
        positions, slots, slot, starts, first, stop, GROUP, RANK, BLOCK_RANK, BLOCK_QUERIES, KV_LEFT
    )
    scale = scaled(scale, vector_scale, 0)
    gdc_wait(PDL)
    queries = _queries(q, index, first_index, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, KV_LEFT)
    first_part = first_index + (place - first).to(tl.int64) * tl.num_programs(1) * GROUP
    sums += first_part * max_splits * RANK
    stats += first_part * max_splits * 2
    dim = per_element(tl.arange(0, BLOCK_RANK), KV_LEFT)
    highest = tl.max(position)
    live = position >= 0
    end = tl.where(highest < 0, 0, split_of(highest) + 1)
    for split in tl.range(tl.program_id(2), end, tl.num_programs(2)):
        acc, total, peak = _split_result(
            queries, position, split, (block_table + slot * table_stride, vectors, block_stride),
            scale, RANK, ROPE, BLOCK_SIZE, TILE, KV_LEFT,
        )  # fmt: skip
        part = index.to(tl.int64) * max_splits + split
        part_at = per_query(part, KV_LEFT) * RANK + dim
        tl.store(sums + part_at, acc, mask=mask & per_query(live, KV_LEFT))
        tl.store(stats + part * 2, total, mask=live)
        tl.store(stats + part * 2 + 1, peak, mask=live)


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
    out,  # [num_rows, heads, RANK]
    max_splits,
    scale,
    vector_scale,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
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
    sums += part * max_splits * RANK
    stats += part * max_splits * 2
    last = split_of(tl.load(positions + row).to(tl.int32))
    dead = None
    if starts is not None:
        dead = tl.load(slots + row) != tl.load(slots + begin)
    scale = scaled(scale, vector_scale, 0)
    gdc_wait(PDL)
    acc, total, _peak = merged_parts(sums, stats, 0, last, scale, RANK, BLOCK_RANK)
    store_output(out, row.to(tl.int64) * heads + head, acc, total, vector_scale, 0, dead, RANK)

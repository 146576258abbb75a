"""Latent attention on Hopper in Gluon, of 64 queries a tile, by two warp groups in turns.

``pair_rows_kernel`` computes all splits of a query tile in one program. ``pair_splits_kernel``
spreads splits evenly over its programs, and ``join_kernel`` joins what they stored.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import new_barriers, swizzled
from sametoken.ops.model.attention.arithmetic import scaled
from sametoken.ops.model.attention.hopper_kernels import jit_over_runs
from sametoken.ops.model.attention.hopper_rows_kernels import own_tile
from sametoken.ops.model.attention.hopper_sums import LOWEST, joined
from sametoken.ops.model.attention.schedule import begin_of, split_of
from sametoken.ops.model.latent_attention.hopper_float8 import widen_all, widen_by_splits
from sametoken.ops.model.latent_attention.hopper_pair_results import (
    CHUNK,
    join_half,
    load_chunk,
    store_half,
)
from sametoken.ops.model.latent_attention.hopper_pair_tiles import (
    PARTS,
    QUERIES,
    ROWS,
    SLOTS,
    attend_split,
    load_tiles,
    total_of,
)
from sametoken.ops.model.latent_attention.hopper_results import store_stats
from sametoken.ops.model.latent_attention.hopper_shares import (
    end_tile,
    own_share,
    own_splits,
    tile_of,
)
from sametoken.ops.model.latent_attention.hopper_tiles import HALF, RANK, ROPE, TILE, ring_of


@gluon.jit
def _memory_of(DTYPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WIDEN_WARPS: gl.constexpr):
    """A program's shared memory: what the groups share, vectors as boxes, and queries as boxes.

    The groups share queries and vectors as tiles, the weights of the tile in turn, maximum scores
    and total weights of each group, and barriers: vectors are there and may be replaced, by half;
    queries are there and may be replaced; weights of a group are there; totals of a group are;
    vectors have landed, by half (``hopper_float8``), else as the first.
    """
    LAYOUT: gl.constexpr = swizzled(DTYPE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rope = gl.allocate_shared_memory(DTYPE, [1, QUERIES, ROPE], LAYOUT)
    q_low = gl.allocate_shared_memory(DTYPE, [PARTS, QUERIES, 64], LAYOUT)
    q_high = gl.allocate_shared_memory(DTYPE, [PARTS, QUERIES, 64], LAYOUT)
    ring, tiles = ring_of(DTYPE, BLOCK_SIZE, SLOTS)
    queries = (
        q_low._reinterpret(DTYPE, [1, QUERIES, HALF], LAYOUT),
        q_high._reinterpret(DTYPE, [1, QUERIES, HALF], LAYOUT),
        q_rope._reinterpret(DTYPE, [1, QUERIES, ROPE], LAYOUT),
    )
    weights = gl.allocate_shared_memory(DTYPE, [QUERIES, TILE], LAYOUT)
    tops = gl.allocate_shared_memory(gl.float32, [2, QUERIES], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [4, QUERIES], FLAT)
    full = (new_barriers(SLOTS, 1), new_barriers(SLOTS, 1))
    free = (new_barriers(SLOTS, 1), new_barriers(SLOTS, 1))
    barriers = (
        full,
        free,
        new_barriers(1, 1),
        new_barriers(1, 2),
        new_barriers(2, 1),
        new_barriers(4, 1),
        (new_barriers(SLOTS, 1), new_barriers(SLOTS, 1)) if WIDEN_WARPS else full,
    )
    memory = (queries, weights, tops, totals, tiles, barriers)
    return memory, ring, (q_low, q_high, q_rope)


@gluon.jit
def _load_all(
    q, vectors, table, last_block, first_query, final, end, boxes, ring, barriers,
    BLOCK_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``pair_rows_kernel``."""
    zero = 0 * end
    load_tiles(
        q, vectors, table, last_block, first_query, final, zero, end, zero, zero, boxes, ring,
        barriers, BLOCK_SIZE, PDL,
    )  # fmt: skip


@gluon.jit
def _attend_all(
    slots, vector_scale, running, out, memory, begin, first, num_queries, position, end, scale,
    HEADS: gl.constexpr, RAGGED: gl.constexpr, ME: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warp group ME of ``pair_rows_kernel``: its half of a query tile over all splits."""
    query = first + gl.arange(0, QUERIES, layout=ROWS)
    live = query < num_queries
    if RAGGED:
        slot = gl.load(slots + begin)
        live = gl.load(slots + begin + query // HEADS, mask=live, other=-1) == slot
    if PDL:
        cuda.gdc_wait()
    running += gl.program_id(0).to(gl.int64) * (QUERIES * RANK)
    out += (begin.to(gl.int64) * HEADS + first) * RANK
    seen, uncut_end = position + query // HEADS, (position + first // HEADS + 1) // TILE
    top = gl.full([QUERIES], LOWEST, gl.float32, ROWS)
    total = gl.zeros([QUERIES], gl.float32, ROWS)
    others = 0 * end
    last = split_of(end * TILE - 1)
    mbarrier.wait(memory[5][2].index(0), 0)
    for split in range(last + 1):
        from_tile, to_tile = begin_of(split) // TILE, min(begin_of(split + 1) // TILE, end)
        sums, own, split_top, others = attend_split(
            memory, from_tile, to_tile, from_tile, others, seen, uncut_end, scale, ME
        )
        BEGIN: gl.constexpr = ME * HALF
        ahead = (
            load_chunk(running, split > 0, BEGIN), load_chunk(running, split > 0, BEGIN + CHUNK)
        )  # fmt: skip
        split_total = total_of(own, memory, split, ME)
        top, total, old, new = joined(top, total, split_top, split_total, scale)
        join_half(
            running, out, ahead, sums, (old, new, total, vector_scale, live), num_queries - first,
            split > 0, split == last, BEGIN,
        )  # fmt: skip


@jit_over_runs
def pair_rows_kernel(
    q,  # descriptor of [num_rows * HEADS, 576]
    vectors,  # descriptor of [num_blocks * BLOCK_SIZE, 576]
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    starts,  # [runs + 1] int64, or None: every run has ``width`` rows
    block_table,  # [num_slots, table_stride] int64
    vector_scale,  # [1] fp32, of float8 vectors, or None
    running,  # [programs, 64, 512] fp32, this kernel's own, in the order of ``dim_of``
    out,  # [num_rows, HEADS, 512], written
    first_run,  # of the launch
    width,  # the most rows of its runs
    num_runs,
    table_stride,
    scale,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_RUNS: gl.constexpr,
    PAIR_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, WIDEN_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All splits of one query tile a program."""
    if PDL:
        cuda.gdc_launch_dependents()
    begin, stop, first = own_tile(starts, first_run, num_runs, width, HEADS, QUERIES, BLOCK_RUNS)
    num_queries = (stop - begin) * HEADS
    if first >= num_queries:
        if PDL:
            cuda.gdc_wait()
        return
    RAGGED: gl.constexpr = starts is not None
    position = gl.load(positions + begin).to(gl.int32)
    end = end_tile(position, first, num_queries, HEADS, QUERIES)
    table = block_table + gl.load(slots + begin) * table_stride
    scale = scaled(scale, vector_scale, 0)
    memory, ring, boxes = _memory_of(q.dtype, BLOCK_SIZE, WIDEN_WARPS)
    gl.warp_specialize(
        [
            (_attend_all, (
                slots, vector_scale, running, out, memory, begin, first, num_queries, position,
                end, scale, HEADS, RAGGED, 0, PDL,
            )),
            (_attend_all, (
                slots, vector_scale, running, out, memory, begin, first, num_queries, position,
                end, scale, HEADS, RAGGED, 1, PDL,
            )),
            (_load_all, (
                q, vectors, table, table_stride - 1, begin * HEADS + first, position, end,
                boxes, ring, memory[5], BLOCK_SIZE, PDL,
            )),
            (widen_all, (ring, memory[5][6], memory[5][0], end, SLOTS, WIDEN_WARPS)),
        ],
        [4, 1, WIDEN_WARPS or 1], [PAIR_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_by_splits(
    q, vectors, positions, slots, starts, block_table, boxes, ring, barriers,
    runs, table_stride, tile, slot, start, low, high,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``pair_splits_kernel``: tiles in the order of ``_attend_by_splits``."""
    _, _, _, num_tiles = runs
    first_tile, count, turn = tile, 0, 0
    while (tile < num_tiles) & (start < high):
        begin, first, num_queries = tile_of(tile, starts, runs, HEADS, QUERIES)
        if first < num_queries:
            final, end, split, last, _ = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                if tile != first_tile:
                    slot = gl.load(slots + begin)
                table = block_table + slot * table_stride
                count = load_tiles(
                    q, vectors, table, table_stride - 1, begin * HEADS + first, final,
                    begin_of(split) // TILE, min(begin_of(last) // TILE, end), count, turn,
                    boxes, ring, barriers, BLOCK_SIZE, PDL,
                )  # fmt: skip
                turn += 1
            start += end
        tile += 1
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _attend_by_splits(
    positions, starts, sums, stats, memory, runs, most, scale, tile, start, low, high,
    HEADS: gl.constexpr, ME: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warp group ME of ``pair_splits_kernel``."""
    _, width, tiles_per_run, num_tiles = runs
    count, turn, others, splits_done = 0, 0, 0, 0
    row = gl.arange(0, QUERIES, layout=ROWS)
    if PDL:
        cuda.gdc_wait()
    while (tile < num_tiles) & (start < high):
        begin, first, num_queries = tile_of(tile, starts, runs, HEADS, QUERIES)
        if first < num_queries:
            position, end, split, last, _ = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                seen = position + (first + row) // HEADS
                place = tile // tiles_per_run * width.to(gl.int64) * HEADS + first
                mbarrier.wait(memory[5][2].index(0), turn & 1)
                for at in range(split, last):
                    from_tile = begin_of(at) // TILE
                    to_tile = min(begin_of(at + 1) // TILE, end)
                    half, own, top, others = attend_split(
                        memory, from_tile, to_tile, count, others, seen,
                        (position + first // HEADS + 1) // TILE, scale, ME,
                    )  # fmt: skip
                    total = total_of(own, memory, splits_done, ME)
                    part = place * most + at
                    store_half(
                        sums + part * RANK, half, num_queries - first, most * RANK, ME * HALF
                    )
                    if ME == 0:
                        store_stats(stats, total, top, num_queries - first, part, most)
                    splits_done += 1
                    count += to_tile - from_tile
                mbarrier.arrive(memory[5][3].index(0))
                turn += 1
            start += end
        tile += 1


@jit_over_runs
def pair_splits_kernel(
    q,  # as for pair_rows_kernel
    vectors,
    positions,
    slots,
    starts,
    block_table,
    vector_scale,
    sums,  # [runs * width, HEADS, most, 512] fp32, written in the order of ``dim_of``
    stats,  # [runs * width, HEADS, most, 2] fp32, written: total weight, maximum score
    first_run,
    width,
    tiles_per_run,
    num_tiles,
    table_stride,
    most,
    scale,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_TILES: gl.constexpr,
    PAIR_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, WIDEN_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Splits spread evenly over programs, as by ``splits_kernel``."""
    if PDL:
        cuda.gdc_launch_dependents()
    runs = (first_run, width, tiles_per_run, num_tiles)
    first_tile, first_slot, start, low, high = own_share(
        positions, slots, starts, runs, HEADS, QUERIES, BLOCK_TILES
    )
    scale = scaled(scale, vector_scale, 0)
    memory, ring, boxes = _memory_of(q.dtype, BLOCK_SIZE, WIDEN_WARPS)
    gl.warp_specialize(
        [
            (_attend_by_splits, (
                positions, starts, sums, stats, memory, runs, most, scale,
                first_tile, start, low, high, HEADS, 0, PDL,
            )),
            (_attend_by_splits, (
                positions, starts, sums, stats, memory, runs, most, scale,
                first_tile, start, low, high, HEADS, 1, PDL,
            )),
            (_load_by_splits, (
                q, vectors, positions, slots, starts, block_table, boxes, ring, memory[5],
                runs, table_stride, first_tile, first_slot, start, low, high,
                HEADS, BLOCK_SIZE, PDL,
            )),
            (widen_by_splits, (
                positions, starts, ring, memory[5][6], memory[5][0], runs,
                first_tile, start, low, high, HEADS, QUERIES, SLOTS, WIDEN_WARPS,
            )),
        ],
        [4, 1, WIDEN_WARPS or 1], [PAIR_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip

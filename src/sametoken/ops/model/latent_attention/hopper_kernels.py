"""Latent attention on Hopper in Gluon, of fewer than 64 queries a tile, and the join of splits.

A warp loads vectors by TMA, one warp group scores them, and two more sum them by their weights.
``splits_kernel`` spreads the splits of tiles of 16 or 32 queries evenly over its programs.
``join_kernel`` joins what it or ``hopper_pair_kernels`` stored.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import new_barriers, products
from sametoken.ops.model.attention.arithmetic import scaled
from sametoken.ops.model.attention.hopper_kernels import jit_over_runs
from sametoken.ops.model.attention.hopper_sums import LOWEST, joined
from sametoken.ops.model.attention.hopper_tiles import rows_of_run
from sametoken.ops.model.attention.schedule import begin_of, splits_before
from sametoken.ops.model.latent_attention.hopper_float8 import widen_by_splits
from sametoken.ops.model.latent_attention.hopper_pair_results import dim_of as pair_dim_of
from sametoken.ops.model.latent_attention.hopper_results import (
    dim_of,
    store_outputs,
    store_stats,
    store_sums,
)
from sametoken.ops.model.latent_attention.hopper_shares import own_share, own_splits, tile_of
from sametoken.ops.model.latent_attention.hopper_tiles import (
    HALF,
    RANK,
    TILE,
    WIDTH,
    divisor_of,
    factors_of,
    load_queries,
    load_tiles,
    memory_of,
    memory_of_ends,
    send_end,
    sum_split,
    total_of,
    weigh_split,
)


@gluon.jit
def _load_by_splits(
    vectors, positions, slots, starts, block_table, ring, landed, free,
    runs, table_stride, tile, slot, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``splits_kernel``: the tiles of ``_attend_by_splits``, in its order."""
    _, _, _, num_tiles = runs
    first_tile, count = tile, 0
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
                    vectors, table, table_stride - 1, final, begin_of(split) // TILE,
                    min(begin_of(last) // TILE, end), count, ring, landed, free,
                    BLOCK_SIZE, SLOTS, PDL,
                )  # fmt: skip
            start += end
        tile += 1
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _weigh_by_splits(
    q, positions, starts, stats, num_joined, queries, tiles, exchanged, barriers, ends,
    runs, most, scale, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, JOINS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp group of ``splits_kernel`` that weighs tiles."""
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, products(QUERIES))
    column = gl.arange(0, QUERIES, layout=BY_QUERY)
    _, width, tiles_per_run, num_tiles = runs
    count, num_ends = 0, 0
    while (tile < num_tiles) & (start < high):
        begin, first, num_queries = tile_of(tile, starts, runs, HEADS, QUERIES)
        if first < num_queries:
            position, end, split, last, after = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                if PDL:
                    cuda.gdc_wait()
                columns = num_queries - first
                at_query = begin.to(gl.int64) * HEADS + first
                load_queries(q + at_query * WIDTH, queries, columns)
                seen = position + (first + column) // HEADS
                uncut_end = (position + first // HEADS + 1) // TILE
                place = tile // tiles_per_run * width.to(gl.int64) * HEADS + first
                all_top = gl.full([QUERIES], LOWEST, gl.float32, BY_QUERY)
                all_total = gl.zeros([QUERIES], gl.float32, BY_QUERY)
                for at in range(split, last):
                    from_tile = begin_of(at) // TILE
                    to_tile = min(begin_of(at + 1) // TILE, end)
                    total, top = weigh_split(
                        queries, tiles, exchanged, barriers, count, from_tile, to_tile,
                        seen, uncut_end, scale,
                    )  # fmt: skip
                    if JOINS and split == 0:
                        all_top, all_total, old, new = joined(all_top, all_total, top, total, scale)
                        send_end(ends, num_ends, old, new, all_total)
                        num_ends += 1
                    else:
                        store_stats(stats, total, top, columns, place * most + at, most)
                    count += to_tile - from_tile
                if JOINS and split == 0:
                    part = place * most + last - 1
                    store_stats(stats, all_total, all_top, columns, part, most)
                    gl.store(num_joined + tile, gl.where(last == after, 0, last))
            start += end
        tile += 1


@gluon.jit
def _sum_by_splits(
    positions, slots, starts, vector_scale, out, sums, latents, exchanged, barriers, ends,
    runs, most, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, JOINS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group of ``splits_kernel`` that sums one half of the latents by their weights."""
    _, width, tiles_per_run, num_tiles = runs
    count, num_ends = 0, 0
    while (tile < num_tiles) & (start < high):
        begin, first, num_queries = tile_of(tile, starts, runs, HEADS, QUERIES)
        if first < num_queries:
            _, end, split, last, after = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                if PDL:
                    cuda.gdc_wait()
                columns = num_queries - first
                place = tile // tiles_per_run * width.to(gl.int64) * HEADS + first
                all_sums = gl.zeros([HALF, QUERIES], gl.float32, products(QUERIES))
                for at in range(split, last):
                    from_tile = begin_of(at) // TILE
                    to_tile = min(begin_of(at + 1) // TILE, end)
                    half = sum_split(latents, exchanged, barriers, count, from_tile, to_tile)
                    if JOINS and split == 0:
                        old, new = factors_of(ends, num_ends)
                        all_sums = gl.fma(all_sums, old[None, :], half * new[None, :])
                        num_ends += 1
                    else:
                        store_sums(sums, half, columns, place * most + at, most)
                    count += to_tile - from_tile
                if JOINS and split == 0:
                    if last == after:
                        total = total_of(ends, num_ends - 1)
                        store_outputs(
                            out, all_sums, total, vector_scale, slots, begin, first, columns, HEADS
                        )
                    else:
                        store_sums(sums, all_sums, columns, place * most + last - 1, most)
            start += end
        tile += 1


@jit_over_runs
def splits_kernel(
    q,  # [num_rows, HEADS, 576]
    vectors,  # descriptor of [num_blocks * BLOCK_SIZE, 576]
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    starts,  # [runs + 1] int64, or None: every run has ``width`` rows
    block_table,  # [num_slots, table_stride] int64
    vector_scale,  # [1] fp32, of float8 vectors, or None
    out,  # [num_rows, HEADS, 512], written if JOINS
    sums,  # [runs * width, HEADS, most, 512] fp32, written in the order of ``dim_of``
    stats,  # [runs * width, HEADS, most, 2] fp32, written: total weight, maximum score
    num_joined,  # [num_tiles] int32, written if JOINS
    first_run,  # of the launch
    width,  # the most rows of its runs
    tiles_per_run,
    num_tiles,
    table_stride,
    most,
    scale,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_TILES: gl.constexpr, JOINS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, WIDEN_WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Splits of tiles of few queries spread evenly over programs, whatever the lengths of rows.

    The KV tiles of all query tiles form a line. Program i of G computes the splits whose middle is
    in the i-th of G equal parts of it, and stores each one's result.

    JOINS: the program that has a query tile's first splits joins what it has of the tile. If that
    is all, it stores the outputs, and ``num_joined`` is 0; else the result at the place of the last
    of them, and ``num_joined`` is their number.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    runs = (first_run, width, tiles_per_run, num_tiles)
    first_tile, first_slot, start, low, high = own_share(
        positions, slots, starts, runs, HEADS, QUERIES, BLOCK_TILES
    )
    scale = scaled(scale, vector_scale, 0)
    queries, ring, tiles, exchanged, barriers = memory_of(
        q, QUERIES, BLOCK_SIZE, SLOTS, WIDEN_WARPS
    )
    ends = memory_of_ends(QUERIES) if JOINS else ()
    landed = new_barriers(SLOTS, 1) if WIDEN_WARPS else barriers[0]
    gl.warp_specialize(
        [
            (_weigh_by_splits, (
                q, positions, starts, stats, num_joined, queries, tiles, exchanged, barriers, ends,
                runs, most, scale, first_tile, start, low, high, HEADS, QUERIES, JOINS, PDL,
            )),
            (_sum_by_splits, (
                positions, slots, starts, vector_scale, out, sums, tiles[0], exchanged, barriers,
                ends, runs, most, first_tile, start, low, high, HEADS, QUERIES, JOINS, PDL,
            )),
            (_sum_by_splits, (
                positions, slots, starts, vector_scale, out + HALF, sums + HALF, tiles[1],
                exchanged, barriers, ends, runs, most,
                first_tile, start, low, high, HEADS, QUERIES, JOINS, PDL,
            )),
            (_load_by_splits, (
                vectors, positions, slots, starts, block_table, ring, landed, barriers[2],
                runs, table_stride, first_tile, first_slot, start, low, high,
                HEADS, QUERIES, BLOCK_SIZE, SLOTS, PDL,
            )),
            (widen_by_splits, (
                positions, starts, ring, (landed, landed), (barriers[0], barriers[0]),
                runs, first_tile, start, low, high, HEADS, QUERIES, SLOTS, WIDEN_WARPS,
            )),
        ],
        [4, 4, 1, WIDEN_WARPS or 1],
        [SUM_REGISTERS, SUM_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _stored_splits(num_joined, tile, num_splits):
    """Of a query with ``num_splits``, the first and the one after the last whose result is stored.

    The first is -1 if a program stored the output.
    """
    first = 0 * num_splits
    if num_joined is not None:
        before = gl.load(num_joined + tile)
        first = before - 1
        num_splits = gl.maximum(num_splits, before)
    return first, num_splits


@jit_over_runs
def join_kernel(
    sums,  # as ``splits_kernel`` or ``pair_splits_kernel`` wrote them
    stats,
    positions,
    slots,
    starts,
    vector_scale,
    num_joined,  # the same, or None
    out,  # [num_rows, HEADS, 512], written
    first_run,
    width,
    tiles_per_run,
    queries,  # of a tile
    most,
    scale,
    HEADS: gl.constexpr, AHEAD: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Join the stored splits of one query in order, and store its output; dead rows are 0.

    PAIR: the kernel of ``hopper_pair_kernels`` stored them, which orders elements otherwise.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [2], [0])
    POLICY: gl.constexpr = "" if PAIR else "evict_last"
    if PDL:
        cuda.gdc_launch_dependents()
    place, head = gl.program_id(0), gl.program_id(1)
    begin, stop = rows_of_run(first_run + place // width, starts, width)
    row = begin + place % width
    if row >= stop:
        if PDL:
            cuda.gdc_wait()
        return
    num_splits = splits_before(gl.load(positions + row).to(gl.int32) + 1)
    live = gl.load(slots + row) == gl.load(slots + begin)
    if PDL:
        cuda.gdc_wait()
    tile = place // width * tiles_per_run + (place % width * HEADS + head) // queries
    first_split, num_splits = _stored_splits(num_joined, tile, num_splits)
    if first_split < 0:
        return
    element = gl.arange(0, RANK, layout=LAYOUT)
    line = (place.to(gl.int64) * HEADS + head) * most
    scale = scaled(scale, vector_scale, 0)
    top, total = LOWEST, 0.0
    acc = gl.zeros([RANK], gl.float32, LAYOUT)
    for split in range(first_split, num_splits, AHEAD):
        parts, tops, totals = (), (), ()
        for ahead in gl.static_range(AHEAD):
            at, exists = line + split + ahead, split + ahead < num_splits
            part = sums + at * RANK + element
            parts += (gl.load(part, mask=exists, other=0.0, eviction_policy=POLICY),)
            tops += (gl.load(stats + at * 2 + 1, mask=exists, other=LOWEST),)
            totals += (gl.load(stats + at * 2, mask=exists, other=0.0),)
        for ahead in gl.static_range(AHEAD):
            top, total, old, new = joined(top, total, tops[ahead], totals[ahead], scale)
            acc = gl.fma(acc, old, parts[ahead] * new)
    acc = acc / divisor_of(total, vector_scale)
    acc = gl.where(live, acc, 0.0)
    at = (row.to(gl.int64) * HEADS + head) * RANK
    dim = pair_dim_of(element) if PAIR else dim_of(element)
    gl.store(out + at + dim, acc.to(out.dtype.element_ty))

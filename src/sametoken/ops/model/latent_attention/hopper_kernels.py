"""Latent attention on Hopper in Gluon, of fewer than 64 queries a tile, and the join of splits.

A warp loads vectors by TMA, one warp group scores them, and another sums them by their weights.
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

from sametoken.ops.model.attention.hopper_kernels import jit_over_runs
from sametoken.ops.model.attention.hopper_tiles import LOWEST, joined, rows_of_run
from sametoken.ops.model.attention.schedule import begin_of, splits_before
from sametoken.ops.model.latent_attention.hopper_pair_results import dim_of as pair_dim_of
from sametoken.ops.model.latent_attention.hopper_shares import own_share, own_splits, tile_of
from sametoken.ops.model.latent_attention.hopper_tiles import (
    RANK,
    TILE,
    WIDTH,
    dim_of,
    load_queries,
    load_tiles,
    memory_of,
    products,
    store_stats,
    store_sums,
    sum_split,
    weigh_split,
)


@gluon.jit
def _load_by_splits(
    vectors, positions, slots, starts, block_table, ring, full, free,
    first_run, width, tiles_per_run, num_tiles, table_stride, tile, slot, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``splits_kernel``: the tiles of ``_attend_by_splits``, in its order."""
    first_tile, count = tile, 0
    while (tile < num_tiles) & (start < high):
        run = first_run + tile // tiles_per_run
        begin, first, num_queries = tile_of(tile, run, starts, width, tiles_per_run, HEADS, QUERIES)
        if first < num_queries:
            final, end, split, last = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                if tile != first_tile:
                    slot = gl.load(slots + begin)
                table = block_table + slot * table_stride
                count = load_tiles(
                    vectors, table, table_stride - 1, final, begin_of(split) // TILE,
                    min(begin_of(last) // TILE, end), count, ring, full, free,
                    BLOCK_SIZE, SLOTS, PDL,
                )  # fmt: skip
            start += end
        tile += 1
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _attend_by_splits(
    q, positions, starts, sums, stats, queries, tiles, exchanged, barriers,
    first_run, width, tiles_per_run, num_tiles, most, scale, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, SCORES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group of ``splits_kernel``.

    SCORES: the one that weighs tiles and stores ``stats``; else the one that stores ``sums``.
    """
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, products(QUERIES)))
    count = 0
    while (tile < num_tiles) & (start < high):
        run = first_run + tile // tiles_per_run
        begin, first, num_queries = tile_of(tile, run, starts, width, tiles_per_run, HEADS, QUERIES)
        if first < num_queries:
            position, end, split, last = own_splits(
                positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
            )
            if split < last:
                if PDL:
                    cuda.gdc_wait()
                columns = num_queries - first
                if SCORES:
                    at_query = begin.to(gl.int64) * HEADS + first
                    load_queries(q + at_query * WIDTH, queries, columns)
                seen = position + (first + column) // HEADS
                uncut_end = (position + first // HEADS + 1) // TILE
                place = tile // tiles_per_run * width.to(gl.int64) * HEADS + first
                for at in range(split, last):
                    from_tile = begin_of(at) // TILE
                    to_tile = min(begin_of(at + 1) // TILE, end)
                    if SCORES:
                        total, top = weigh_split(
                            queries, tiles, exchanged, barriers, count, from_tile, to_tile,
                            seen, uncut_end, scale,
                        )  # fmt: skip
                        store_stats(stats, total, top, columns, place * most + at, most)
                    else:
                        sum_low, sum_high = sum_split(
                            tiles, exchanged, barriers, count, from_tile, to_tile
                        )
                        store_sums(sums, sum_low, sum_high, columns, place * most + at, most)
                    count += to_tile - from_tile
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
    sums,  # [runs * width, HEADS, most, 512] fp32, written in the order of ``dim_of``
    stats,  # [runs * width, HEADS, most, 2] fp32, written: total weight, maximum score
    first_run,  # of the launch
    width,  # the most rows of its runs
    tiles_per_run,
    num_tiles,
    table_stride,
    most,
    scale,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Splits of tiles of few queries spread evenly over programs, whatever the lengths of rows.

    The KV tiles of all query tiles form a line. Program i of G computes the splits whose middle is
    in the i-th of G equal parts of it, and stores each one's result.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    first_tile, first_slot, start, low, high = own_share(
        positions, slots, starts, first_run, width, tiles_per_run, num_tiles,
        HEADS, QUERIES, BLOCK_TILES, 4,
    )  # fmt: skip
    queries, ring, tiles, exchanged, barriers = memory_of(q, QUERIES, BLOCK_SIZE, SLOTS)
    gl.warp_specialize(
        [
            (_attend_by_splits, (
                q, positions, starts, sums, stats, queries, tiles, exchanged, barriers,
                first_run, width, tiles_per_run, num_tiles, most, scale,
                first_tile, start, low, high, HEADS, QUERIES, True, PDL,
            )),
            (_attend_by_splits, (
                q, positions, starts, sums, stats, queries, tiles, exchanged, barriers,
                first_run, width, tiles_per_run, num_tiles, most, scale,
                first_tile, start, low, high, HEADS, QUERIES, False, PDL,
            )),
            (_load_by_splits, (
                vectors, positions, slots, starts, block_table, ring, barriers[0], barriers[2],
                first_run, width, tiles_per_run, num_tiles, table_stride,
                first_tile, first_slot, start, low, high,
                HEADS, QUERIES, BLOCK_SIZE, SLOTS, PDL,
            )),
        ],
        [4, 1], [200 if QUERIES == 16 else 232, 40 if QUERIES == 16 else 48],
    )  # fmt: skip


@jit_over_runs
def join_kernel(
    sums,  # as ``splits_kernel`` or ``pair_splits_kernel`` wrote them
    stats,
    positions,
    slots,
    starts,
    out,  # [num_rows, HEADS, 512], written
    first_run,
    width,
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
    element = gl.arange(0, RANK, layout=LAYOUT)
    line = (place.to(gl.int64) * HEADS + head) * most
    top, total = LOWEST, 0.0
    acc = gl.zeros([RANK], gl.float32, LAYOUT)
    for split in range(0, num_splits, AHEAD):
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
    acc = acc / gl.where(total == 0.0, 1.0, total)
    acc = gl.where(live, acc, 0.0)
    at = (row.to(gl.int64) * HEADS + head) * RANK
    dim = pair_dim_of(element) if PAIR else dim_of(element)
    gl.store(out + at + dim, acc.to(out.dtype.element_ty))

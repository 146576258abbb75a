"""Latent attention on Hopper in Gluon: a warp loads vectors by TMA while warp groups multiply them.

A query tile is a range of a run's rows x heads, whatever row it begins in. ``rows_kernel`` computes
all splits of one. ``splits_kernel`` spreads the splits of few or uneven rows evenly over its
programs, and ``join_kernel`` joins what they stored.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.model.attention.hopper_kernels import added, jit_over_runs
from sametoken.ops.model.attention.hopper_tiles import LOWEST, joined, rows_of_run
from sametoken.ops.model.attention.schedule import begin_of, split_of, splits_before
from sametoken.ops.model.latent_attention.hopper_tiles import (
    HALF,
    RANK,
    TILE,
    WIDTH,
    attend_split,
    dim_of,
    join_half,
    load_queries,
    load_tiles,
    memory_of,
    products,
    store_part,
)


@gluon.jit
def _end_tile(position, first, num_queries, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """The KV tile after the last that a query tile sees, of a run that begins at ``position``.

    Dead rows at a run's end count too: they read vectors and give nothing.
    """
    last_row = (gl.minimum(first + QUERIES, num_queries) - 1) // HEADS
    return (position + last_row + TILE) // TILE


@gluon.jit
def _load_by_splits(
    vectors, positions, slots, starts, block_table, ring, full, free,
    first_run, width, tiles_per_run, num_tiles, table_stride, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``splits_kernel``: the tiles of ``_attend_by_splits``, in its order."""
    count = 0
    while (tile < num_tiles) & (start < high):
        begin, stop = rows_of_run(first_run + tile // tiles_per_run, starts, width)
        first, num_queries = tile % tiles_per_run * QUERIES, (stop - begin) * HEADS
        if first < num_queries:
            final = gl.load(positions + begin).to(gl.int32)
            end = _end_tile(final, first, num_queries, HEADS, QUERIES)
            split = splits_before(max(low - start, 0) * TILE)
            last = splits_before(min(high - start, end) * TILE)
            if split < last:
                table = block_table + gl.load(slots + begin) * table_stride
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
    q, positions, starts, sums, stats, queries, weights, tiles, full, free,
    first_run, width, tiles_per_run, num_tiles, most, scale, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps of ``splits_kernel``."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, products((4, WARPS // 4), QUERIES))
    column = gl.arange(0, QUERIES, layout=COLUMN)
    count = 0
    while (tile < num_tiles) & (start < high):
        begin, stop = rows_of_run(first_run + tile // tiles_per_run, starts, width)
        first, num_queries = tile % tiles_per_run * QUERIES, (stop - begin) * HEADS
        if first < num_queries:
            position = gl.load(positions + begin).to(gl.int32)
            end = _end_tile(position, first, num_queries, HEADS, QUERIES)
            split = splits_before(max(low - start, 0) * TILE)
            last = splits_before(min(high - start, end) * TILE)
            if split < last:
                if PDL:
                    cuda.gdc_wait()
                load_queries(
                    q + (begin.to(gl.int64) * HEADS + first) * WIDTH, queries,
                    num_queries - first, WARPS,
                )  # fmt: skip
                seen = position + (first + column) // HEADS
                place = tile // tiles_per_run * width.to(gl.int64) * HEADS + first
                for at in range(split, last):
                    from_tile = begin_of(at) // TILE
                    to_tile = min(begin_of(at + 1) // TILE, end)
                    sum_low, sum_high, total, top = attend_split(
                        queries, weights, tiles, full, free, count, from_tile, to_tile, seen,
                        (position + first // HEADS + 1) // TILE, scale, SLOTS, WARPS,
                    )  # fmt: skip
                    count += to_tile - from_tile
                    store_part(
                        sums, stats, sum_low, sum_high, total, top, num_queries - first,
                        place * most + at, most, WARPS,
                    )  # fmt: skip
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
    BLOCK_TILES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Splits spread evenly over programs, whatever the lengths of rows.

    The KV tiles of all query tiles form a line. Program i of G computes the splits that begin in
    the i-th of G equal parts of it, and stores each one's result.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tile = gl.arange(0, BLOCK_TILES, layout=LINE)
    run = first_run + gl.minimum(tile, num_tiles - 1) // tiles_per_run
    begin, stop = rows_of_run(run, starts, width)
    first, num_queries = tile % tiles_per_run * QUERIES, (stop - begin) * HEADS
    exists = (tile < num_tiles) & (first < num_queries)
    position = gl.load(positions + begin, mask=exists, other=0).to(gl.int32)
    length = gl.where(exists, _end_tile(position, first, num_queries, HEADS, QUERIES), 0)
    ends = gl.associative_scan(length, 0, added)
    share, programs = gl.max(ends, 0).to(gl.int64), gl.num_programs(0)
    low = ((gl.program_id(0) * share + programs - 1) // programs).to(gl.int32)
    high = (((gl.program_id(0) + 1) * share + programs - 1) // programs).to(gl.int32)
    behind = ends <= low
    first_tile = gl.sum(behind.to(gl.int32), 0)
    start = gl.max(gl.where(behind, ends, 0), 0)

    queries, weights, ring, tiles, full, free = memory_of(q, QUERIES, BLOCK_SIZE, SLOTS)
    gl.warp_specialize(
        [
            (_attend_by_splits, (
                q, positions, starts, sums, stats, queries, weights, tiles, full, free,
                first_run, width, tiles_per_run, num_tiles, most, scale,
                first_tile, start, low, high,
                HEADS, QUERIES, SLOTS, WARPS, PDL,
            )),
            (_load_by_splits, (
                vectors, positions, slots, starts, block_table, ring, full, free,
                first_run, width, tiles_per_run, num_tiles, table_stride,
                first_tile, start, low, high,
                HEADS, QUERIES, BLOCK_SIZE, SLOTS, PDL,
            )),
        ],
        [1], [24],
    )  # fmt: skip


@jit_over_runs
def join_kernel(
    sums,  # as for splits_kernel
    stats,
    positions,
    slots,
    starts,
    out,  # [num_rows, HEADS, 512], written
    first_run,
    width,
    most,
    scale,
    HEADS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Join the stored splits of one query in order, and store its output; dead rows are 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
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
            parts += (gl.load(sums + at * RANK + element, mask=exists, other=0.0),)
            tops += (gl.load(stats + at * 2 + 1, mask=exists, other=LOWEST),)
            totals += (gl.load(stats + at * 2, mask=exists, other=0.0),)
        for ahead in gl.static_range(AHEAD):
            top, total, old, new = joined(top, total, tops[ahead], totals[ahead], scale)
            acc = gl.fma(acc, old, parts[ahead] * new)
    acc = acc / gl.where(total == 0.0, 1.0, total)
    acc = gl.where(live, acc, 0.0)
    at = (row.to(gl.int64) * HEADS + head) * RANK
    gl.store(out + at + dim_of(element), acc.to(out.dtype.element_ty))


@gluon.jit
def _load_all(
    vectors, table, last_block, final, end, ring, full, free,
    BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``rows_kernel``."""
    load_tiles(
        vectors, table, last_block, final, 0, end, 0 * end, ring, full, free,
        BLOCK_SIZE, SLOTS, PDL,
    )  # fmt: skip
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _attend_all(
    q, slots, running, out, queries, weights, tiles, full, free,
    begin, first, num_queries, position, end, scale,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
    RAGGED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps of ``rows_kernel``: a query tile over all splits."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, products((4, WARPS // 4), QUERIES))
    column = gl.arange(0, QUERIES, layout=COLUMN)
    row = (first + column) // HEADS
    live = first + column < num_queries
    if RAGGED:
        slot = gl.load(slots + begin)
        live = gl.load(slots + begin + row, mask=live, other=-1) == slot
    base, left = begin.to(gl.int64) * HEADS + first, num_queries - first
    if PDL:
        cuda.gdc_wait()
    load_queries(q + base * WIDTH, queries, left, WARPS)
    top = gl.full([QUERIES], LOWEST, gl.float32, COLUMN)
    total = gl.zeros([QUERIES], gl.float32, COLUMN)
    running += gl.program_id(0).to(gl.int64) * (QUERIES * RANK)
    last = split_of(end * TILE - 1)
    for split in range(last + 1):
        from_tile, to_tile = begin_of(split) // TILE, min(begin_of(split + 1) // TILE, end)
        sum_low, sum_high, split_total, split_top = attend_split(
            queries, weights, tiles, full, free, from_tile, from_tile, to_tile, position + row,
            (position + first // HEADS + 1) // TILE, scale, SLOTS, WARPS,
        )  # fmt: skip
        top, total, old, new = joined(top, total, split_top, split_total, scale)
        join_half(
            running, out + base * RANK, sum_low, old, new, total, live, left,
            split > 0, split == last, 0, WARPS,
        )  # fmt: skip
        join_half(
            running, out + base * RANK, sum_high, old, new, total, live, left,
            split > 0, split == last, HALF, WARPS,
        )  # fmt: skip


@gluon.jit
def _own_tile(
    starts, first_run, num_runs, width, HEADS: gl.constexpr, QUERIES: gl.constexpr,
    BLOCK_RUNS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """First row of this program's run, the row after its last, and the tile's first query in it.

    Of a run, the tiles with the most KV come first. A program without a tile gets an empty run.
    """
    place = gl.program_id(0)
    if starts is None:
        begin = (first_run + place % num_runs) * width
        stop = begin + width
        tile = (width * HEADS + QUERIES - 1) // QUERIES - 1 - place // num_runs
    else:
        # Tiles are counted by run, since padded steps have many runs without rows.
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        run = gl.arange(0, BLOCK_RUNS, layout=LINE)
        at = starts + first_run + run
        begins = gl.load(at, mask=run < num_runs, other=0).to(gl.int32)
        stops = gl.load(at + 1, mask=run < num_runs, other=0).to(gl.int32)
        tiles = ((stops - begins) * HEADS + QUERIES - 1) // QUERIES
        following = gl.associative_scan(tiles, 0, added)
        own = (following - tiles <= place) & (place < following)
        begin = gl.sum(gl.where(own, begins, 0), 0)
        stop = gl.sum(gl.where(own, stops, 0), 0)
        tile = gl.maximum(gl.sum(gl.where(own, following, 0), 0) - 1 - place, 0)
    return begin, stop, tile * QUERIES


@jit_over_runs
def rows_kernel(
    q,  # as for splits_kernel
    vectors,
    positions,
    slots,
    starts,
    block_table,
    running,  # [programs, QUERIES, 512] fp32, this kernel's own, in the order of ``dim_of``
    out,  # [num_rows, HEADS, 512], written
    first_run,
    width,
    num_runs,
    table_stride,
    scale,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    BLOCK_RUNS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All splits of one query tile a program."""
    if PDL:
        cuda.gdc_launch_dependents()
    begin, stop, first = _own_tile(
        starts, first_run, num_runs, width, HEADS, QUERIES, BLOCK_RUNS, WARPS
    )
    num_queries = (stop - begin) * HEADS
    if first >= num_queries:
        if PDL:
            cuda.gdc_wait()
        return
    RAGGED: gl.constexpr = starts is not None
    position = gl.load(positions + begin).to(gl.int32)
    end = _end_tile(position, first, num_queries, HEADS, QUERIES)
    table = block_table + gl.load(slots + begin) * table_stride
    queries, weights, ring, tiles, full, free = memory_of(q, QUERIES, BLOCK_SIZE, SLOTS)
    gl.warp_specialize(
        [
            (_attend_all, (
                q, slots, running, out, queries, weights, tiles, full, free,
                begin, first, num_queries, position, end, scale,
                HEADS, QUERIES, SLOTS, WARPS, RAGGED, PDL,
            )),
            (_load_all, (
                vectors, table, table_stride - 1, position, end, ring, full, free,
                BLOCK_SIZE, SLOTS, PDL,
            )),
        ],
        [1], [24],
    )  # fmt: skip

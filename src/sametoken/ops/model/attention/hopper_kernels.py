"""Attention on Hopper in Gluon: a warp loads KV tiles by TMA while warp groups multiply them.

``splits_kernel`` spreads the splits of few or uneven rows evenly over its programs
(``hopper_rows_kernels`` computes all of a query tile in one).
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import barrier, new_barriers, swizzled
from sametoken.ops.model.attention import hopper_columns
from sametoken.ops.model.attention.arithmetic import scaled
from sametoken.ops.model.attention.hopper_float8 import widen_by_splits
from sametoken.ops.model.attention.hopper_sums import QUERIES, SHARED_DIM
from sametoken.ops.model.attention.hopper_tiles import (
    attend,
    extent,
    join_parts,
    last_seen_of,
    load_queries,
    load_tiles,
    own_tiles,
    run_of,
    store_part,
    store_rows,
)

#: A counter's unit for splits whose result went into the split after them.
JOINED = gl.constexpr(1 << 16)


@gluon.jit
def _next(tile, head, num_tiles):
    """The query tile after this one, of this KV head or the next."""
    return (tile + 1) % num_tiles, head + (tile + 1) // num_tiles


@gluon.jit
def _load_by_splits(
    keys, values, positions, slots, starts, block_table, ring, full, free,
    first_run, width, tiles_per_run, num_tiles, table_stride, head, tile, start, low, high,
    KV_HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    BLOCK_DIM: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``splits_kernel``: the tiles of ``_attend_by_splits``, in its order."""
    count = 0
    while start < high:
        begin, first, stop = run_of(tile, starts, first_run, width, tiles_per_run, ROWS)
        if first < stop:
            position = gl.load(positions + first).to(gl.int32)
            first_split, end, before = extent(position, stop - first, TILE, WINDOW)
            table = block_table + gl.load(slots + begin) * table_stride
            final = gl.load(positions + begin).to(gl.int32)
            shift = before - start
            split, last, _, kv, stop_kv = own_tiles(
                low + shift, high + shift, first_split, before, end, TILE, WINDOW
            )
            if split < last:
                last_seen = last_seen_of(position, first, stop, table_stride, BLOCK_SIZE)
                count = load_tiles(
                    keys, values, table, last_seen, final, head, kv, stop_kv, count,
                    ring, full, free, KV_HEADS, BLOCK_SIZE, TILE, BLOCK_DIM, SLOTS, PDL,
                )  # fmt: skip
            start += end - before
        tile, head = _next(tile, head, num_tiles)
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _attend(
    q_memory, ring, full, free, count, begin, end, position, num_rows, scale, between,
    sums, stats, part, most, joins, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Queries over KV tiles: few as columns of products, 64 as rows."""
    if q_memory.shape[0] < QUERIES:
        found = hopper_columns.attend(
            q_memory, ring, full, free, count, begin, end, position, num_rows, scale,
            between, sums, stats, part, most, joins,
            HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS,
        )  # fmt: skip
    else:
        found = attend(
            q_memory, ring, full, free, count, begin, end, position, num_rows, scale,
            between, None, sums, stats, part, most, joins,
            HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS,
        )  # fmt: skip
    return found


@gluon.jit
def _attend_by_splits(
    q, positions, slots, starts, sinks, k_scales, v_scales, out, sums, stats, arrived, q_memory,
    between, ring, full, free, first_run, width, tiles_per_run, num_tiles, head, tile, start, low,
    high, most, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_DIM: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps of ``splits_kernel``."""
    HEADS: gl.constexpr = KV_HEADS * GROUP
    RAGGED: gl.constexpr = starts is not None
    KEEPS: gl.constexpr = q_memory.shape[0] < QUERIES or between.shape[1] == QUERIES
    count = 0
    while start < high:
        begin, first, stop = run_of(tile, starts, first_run, width, tiles_per_run, ROWS)
        if first < stop:
            num_rows = stop - first
            position = gl.load(positions + first).to(gl.int32)
            first_split, end, before = extent(position, num_rows, TILE, WINDOW)
            shift = before - start
            split, last, end_split, kv, stop_kv = own_tiles(
                low + shift, high + shift, first_split, before, end, TILE, WINDOW
            )
            if split < last:
                slot = gl.load(slots + begin)
                if PDL:
                    cuda.gdc_wait()
                load_queries(q, q_memory, first, num_rows, head, HEADS, GROUP, HEAD_DIM, BLOCK_DIM)
                place = tile // tiles_per_run * width + tile % tiles_per_run * ROWS
                part = (place.to(gl.int64) * HEADS + head * GROUP) * most - first_split
                # The first splits are joined in turn; the others wait for those before them.
                joins = split == first_split
                own_scale = scaled(scale, k_scales, head)
                acc, top, total = _attend(
                    q_memory, ring, full, free, count, kv, stop_kv, position, num_rows, own_scale,
                    between if KEEPS else None, sums, stats, part, most, joins,
                    HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS,
                )  # fmt: skip
                if KEEPS and joins & (last == end_split):
                    store_rows(
                        out, slots, slot, sinks, v_scales, acc, top, total, first, num_rows, head,
                        own_scale, HEADS, GROUP, HEAD_DIM, RAGGED,
                    )  # fmt: skip
                else:
                    store_part(
                        sums, stats, acc, top, total, num_rows, part + last - 1,
                        HEADS, GROUP, HEAD_DIM, most,
                    )  # fmt: skip
                    # Whoever stores the last parts joins all of them: nobody waits.
                    barrier()
                    counter = arrived + head * num_tiles + tile
                    own = last - split
                    if KEEPS and joins:
                        own += JOINED * (own - 1)
                    stored = own + gl.atomic_add(counter, own, sem="acq_rel", scope="gpu")
                    if stored % JOINED == end_split - first_split:
                        gl.store(counter, 0)
                        join_parts(
                            out, slots, slot, sinks, v_scales, sums, stats, first, num_rows,
                            first_split + stored // JOINED, end_split, part, most, head, own_scale,
                            HEADS, GROUP, HEAD_DIM, BLOCK_DIM, RAGGED,
                        )  # fmt: skip
                count += stop_kv - kv
            start += end - before
        tile, head = _next(tile, head, num_tiles)


@gluon.jit
def added(a, b):
    """For scans."""
    return a + b


#: Of kernels over runs: no number of a batch makes another kernel.
jit_over_runs = gluon.jit(
    do_not_specialize=[
        "first_run",
        "width",
        "tiles_per_run",
        "num_tiles",
        "num_runs",
        "table_stride",
        "most",
    ],
    do_not_specialize_on_alignment=["starts"],
)


@jit_over_runs
def splits_kernel(
    q,  # [num_rows, heads, HEAD_DIM]
    keys,  # descriptor of [num_blocks * KV_HEADS * BLOCK_SIZE, HEAD_DIM]
    values,
    positions,  # [num_rows] int64
    slots,  # [num_rows] int64
    starts,  # [runs + 1] int64, or None: every run has ``width`` rows
    block_table,  # [num_slots, table_stride] int64
    sinks,  # [heads] fp32, or None
    k_scales,  # [KV_HEADS] fp32, of float8 keys, or None
    v_scales,
    out,  # [num_rows, heads, HEAD_DIM], written
    sums,  # [runs * width, heads, most, HEAD_DIM] fp32, written
    stats,  # [runs * width, heads, most, 2] fp32, written: total weight, maximum score
    arrived,  # [KV_HEADS, num_tiles] int32, 0 before and after: splits whose results are stored
    first_run,  # of the launch
    width,  # the most rows of its runs
    tiles_per_run,
    num_tiles,
    table_stride,
    most,
    scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_TILES: gl.constexpr, WIDEN_WARPS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, WIDEN_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Splits spread evenly over programs, whatever the lengths of rows.

    The KV tiles of all query tiles and KV heads form a line. Program i of G computes the splits
    whose middle is in the i-th of G equal parts of it. Of a query tile that several programs share,
    the first of them joins what it has, the others store each split's result, and the program that
    comes last joins those. A query tile has COLUMNS queries, as columns of products, or if that is
    0 64, as rows.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    OWN: gl.constexpr = COLUMNS if COLUMNS else QUERIES
    ROWS: gl.constexpr = OWN // GROUP
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.arange(0, BLOCK_TILES, layout=LINE)
    _, first, stop = run_of(
        gl.minimum(tile, num_tiles - 1), starts, first_run, width, tiles_per_run, ROWS
    )
    exists = (tile < num_tiles) & (first < stop)
    position = gl.load(positions + first, mask=exists, other=0).to(gl.int32)
    _, end, before = extent(position, stop - first, TILE, WINDOW)
    ends = gl.associative_scan(gl.where(exists, end - before, 0), 0, added)
    length = gl.max(ends, 0)
    share = (length * KV_HEADS).to(gl.int64)
    programs = gl.num_programs(0)
    low = ((gl.program_id(0) * share + programs - 1) // programs).to(gl.int32)
    high = (((gl.program_id(0) + 1) * share + programs - 1) // programs).to(gl.int32)
    head = low // max(length, 1)
    behind = ends + head * length <= low
    first_tile = gl.sum(behind.to(gl.int32), 0)
    start = head * length + gl.max(gl.where(behind, ends, 0), 0)

    BOX: gl.constexpr = keys.block_shape[0]
    BOXES: gl.constexpr = (TILE // BOX) * (BLOCK_DIM // 64)
    DTYPE: gl.constexpr = q.dtype.element_ty
    q_memory = gl.allocate_shared_memory(DTYPE, [OWN, BLOCK_DIM], swizzled(DTYPE))
    if COLUMNS:
        # A tile's weights.
        between = gl.allocate_shared_memory(DTYPE, [COLUMNS, TILE], swizzled(DTYPE))
    else:
        # Sums over splits. Larger heads leave no room: there those of whole query tiles are stored.
        KEPT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        KEPT_ROWS: gl.constexpr = QUERIES if BLOCK_DIM <= SHARED_DIM else 1
        between = gl.allocate_shared_memory(gl.float32, [1, KEPT_ROWS, BLOCK_DIM], KEPT)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS * BOXES, BOX, 64], swizzled(DTYPE))
    full, free = new_barriers(SLOTS, 1), new_barriers(SLOTS, 1)
    landed = new_barriers(SLOTS, 1) if WIDEN_WARPS else full
    gl.warp_specialize(
        [
            (_attend_by_splits, (
                q, positions, slots, starts, sinks, k_scales, v_scales, out, sums, stats, arrived,
                q_memory, between, ring, full, free,
                first_run, width, tiles_per_run, num_tiles, head, first_tile, start, low, high,
                most, scale,
                KV_HEADS, GROUP, ROWS, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS, PDL,
            )),
            (_load_by_splits, (
                keys, values, positions, slots, starts, block_table, ring, landed, free,
                first_run, width, tiles_per_run, num_tiles, table_stride,
                head, first_tile, start, low, high,
                KV_HEADS, ROWS, BLOCK_SIZE, TILE, BLOCK_DIM, WINDOW, SLOTS, PDL,
            )),
            (widen_by_splits, (
                positions, starts, ring, landed, full, first_run, width, tiles_per_run, num_tiles,
                first_tile, start, low, high, ROWS, TILE, BLOCK_DIM, WINDOW, SLOTS, WIDEN_WARPS,
            )),
        ],
        [1, WIDEN_WARPS or 1], [LOAD_REGISTERS, WIDEN_REGISTERS],
    )  # fmt: skip

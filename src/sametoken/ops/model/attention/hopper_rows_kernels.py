"""Attention on Hopper in Gluon: all splits of a query tile in one program, ``rows_kernel``."""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import new_barriers, swizzled
from sametoken.ops.model.attention.arithmetic import scaled
from sametoken.ops.model.attention.hopper_float8 import widen_all
from sametoken.ops.model.attention.hopper_kernels import added, jit_over_runs
from sametoken.ops.model.attention.hopper_sums import QUERIES, kept_shape
from sametoken.ops.model.attention.hopper_tiles import (
    attend,
    extent,
    last_seen_of,
    load_queries,
    load_tiles,
    store_rows,
)


@gluon.jit
def _load_all(
    keys, values, table, last_seen, final, begin, end, ring, full, free,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp of ``rows_kernel``."""
    load_tiles(
        keys, values, table, last_seen, final, gl.program_id(1), begin, end, 0 * begin,
        ring, full, free, KV_HEADS, BLOCK_SIZE, TILE, BLOCK_DIM, SLOTS, PDL,
    )  # fmt: skip
    if PDL:
        cuda.gdc_wait()


@gluon.jit
def _attend_all(
    q, slots, slot, sinks, k_scales, v_scales, out, q_memory, kept, rest, ring, full, free,
    first, stop, position, begin, end, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
    TILE: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr, RAGGED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One warp group of ``rows_kernel``: its rows over all splits."""
    HEADS: gl.constexpr = KV_HEADS * GROUP
    head = gl.program_id(1)
    if PDL:
        cuda.gdc_wait()
    load_queries(q, q_memory, first, stop - first, head, HEADS, GROUP, HEAD_DIM, BLOCK_DIM)
    scale = scaled(scale, k_scales, head)
    acc, top, total = attend(
        q_memory, ring, full, free, 0 * begin, begin, end, position, stop - first, scale,
        kept, rest, None, None, None, None, True,
        HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS,
    )  # fmt: skip
    store_rows(
        out, slots, slot, sinks, v_scales, acc, top, total, first, stop - first, head, scale,
        HEADS, GROUP, HEAD_DIM, RAGGED,
    )  # fmt: skip


@gluon.jit
def own_tile(
    starts, first_run, num_runs, width, HEADS: gl.constexpr, TILE: gl.constexpr,
    BLOCK_RUNS: gl.constexpr,
):  # fmt: skip
    """First row of this program's run, the row after its last, and its tile's first query in it.

    A tile has TILE queries of a run's rows x HEADS. Of a run, the tiles with the most KV come
    first. A program without a tile gets an empty run.
    """
    place = gl.program_id(0)
    if starts is None:
        begin = (first_run + place % num_runs) * width
        stop = begin + width
        tile = (width * HEADS + TILE - 1) // TILE - 1 - place // num_runs
    else:
        # Tiles are counted by run, since padded steps have many runs without rows.
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        run = gl.arange(0, BLOCK_RUNS, layout=LINE)
        at = starts + first_run + run
        begins = gl.load(at, mask=run < num_runs, other=0).to(gl.int32)
        stops = gl.load(at + 1, mask=run < num_runs, other=0).to(gl.int32)
        tiles = ((stops - begins) * HEADS + TILE - 1) // TILE
        following = gl.associative_scan(tiles, 0, added)
        own = (following - tiles <= place) & (place < following)
        begin = gl.sum(gl.where(own, begins, 0), 0)
        stop = gl.sum(gl.where(own, stops, 0), 0)
        tile = gl.maximum(gl.sum(gl.where(own, following, 0), 0) - 1 - place, 0)
    return begin, stop, tile * TILE


@jit_over_runs
def rows_kernel(
    q,  # as for splits_kernel
    keys,
    values,
    positions,
    slots,
    starts,
    block_table,
    sinks,
    k_scales,
    v_scales,
    out,  # [num_rows, heads, HEAD_DIM]
    running,  # [programs, WARP_GROUPS, QUERIES, columns that ``kept_shape`` leaves] fp32
    first_run,
    width,
    num_runs,
    table_stride,
    scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_RUNS: gl.constexpr, WIDEN_WARPS: gl.constexpr,
    PAIR_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, WIDEN_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All splits of one query tile a program."""
    if PDL:
        cuda.gdc_launch_dependents()
    ROWS: gl.constexpr = QUERIES // GROUP
    OWN: gl.constexpr = WARP_GROUPS * ROWS
    begin, stop, first = own_tile(starts, first_run, num_runs, width, 1, OWN, BLOCK_RUNS)
    first = begin + first
    stop = gl.minimum(first + OWN, stop)
    if first >= stop:
        if PDL:
            cuda.gdc_wait()
        return
    RAGGED: gl.constexpr = starts is not None
    slot = gl.load(slots + begin)
    final = gl.load(positions + begin).to(gl.int32)
    position = gl.load(positions + first).to(gl.int32)
    _, end, before = extent(position, stop - first, TILE, WINDOW)
    table = block_table + slot * table_stride
    last_seen = last_seen_of(position, first, stop, table_stride, BLOCK_SIZE)

    BOX: gl.constexpr = keys.block_shape[0]
    BOXES: gl.constexpr = (TILE // BOX) * (BLOCK_DIM // 64)
    DTYPE: gl.constexpr = q.dtype.element_ty
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    q_memory = gl.allocate_shared_memory(DTYPE, [WARP_GROUPS, QUERIES, BLOCK_DIM], swizzled(DTYPE))
    KEPT_SHAPE: gl.constexpr = kept_shape(BLOCK_DIM, WARP_GROUPS)
    REST: gl.constexpr = QUERIES * (BLOCK_DIM - KEPT_SHAPE[0] * KEPT_SHAPE[2])
    kept = gl.allocate_shared_memory(gl.float32, KEPT_SHAPE, KEPT)
    program = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    rest = running + program.to(gl.int64) * (WARP_GROUPS * REST)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS * BOXES, BOX, 64], swizzled(DTYPE))
    full, free = new_barriers(SLOTS, 1), new_barriers(SLOTS, WARP_GROUPS)
    landed = new_barriers(SLOTS, 1) if WIDEN_WARPS else full
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_all, (
                    q, slots, slot, sinks, k_scales, v_scales, out, q_memory.index(0), kept, rest,
                    ring, full, free,
                    first, stop, position, before, end, scale,
                    KV_HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS, RAGGED, PDL,
                )),
                (_load_all, (
                    keys, values, table, last_seen, final, before, end, ring, landed, free,
                    KV_HEADS, BLOCK_SIZE, TILE, BLOCK_DIM, SLOTS, PDL,
                )),
                (widen_all, (
                    ring, landed, full, end - before, TILE, BLOCK_DIM, SLOTS, WIDEN_WARPS,
                )),
            ],
            [1, WIDEN_WARPS or 1], [LOAD_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip
    else:
        kept_2 = gl.allocate_shared_memory(gl.float32, KEPT_SHAPE, KEPT)
        gl.warp_specialize(
            [
                (_attend_all, (
                    q, slots, slot, sinks, k_scales, v_scales, out, q_memory.index(0), kept, rest,
                    ring, full, free,
                    first, min(first + ROWS, stop), position, before, end, scale,
                    KV_HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS, RAGGED, PDL,
                )),
                (_attend_all, (
                    q, slots, slot, sinks, k_scales, v_scales, out, q_memory.index(1), kept_2,
                    rest + REST, ring, full, free, first + ROWS, stop, position + ROWS,
                    before, end, scale,
                    KV_HEADS, GROUP, HEAD_DIM, BLOCK_DIM, TILE, WINDOW, SLOTS, RAGGED, PDL,
                )),
                (_load_all, (
                    keys, values, table, last_seen, final, before, end, ring, landed, free,
                    KV_HEADS, BLOCK_SIZE, TILE, BLOCK_DIM, SLOTS, PDL,
                )),
                (widen_all, (
                    ring, landed, full, end - before, TILE, BLOCK_DIM, SLOTS, WIDEN_WARPS,
                )),
            ],
            [4, 1, WIDEN_WARPS or 1], [PAIR_REGISTERS, LOAD_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip

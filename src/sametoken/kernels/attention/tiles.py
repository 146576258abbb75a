# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Which rows and heads a program of attention serves."""

from __future__ import annotations

import triton
import triton.language as tl

from sametoken.kernels.attention.arithmetic import per_element, per_query


@triton.jit
def tile_rows(starts, first_run, width, TILE_ROWS: tl.constexpr):
    """This program's query tile: its run's first row, its own, where it ends, and its place.

    Places count the launch's rows as if all of its runs had ``width``.
    """
    tiles_per_run = tl.cdiv(width, TILE_ROWS)
    run = tl.program_id(0) // tiles_per_run
    offset = (tl.program_id(0) % tiles_per_run) * TILE_ROWS
    if starts is None:
        begin = (first_run + run) * width
        end = begin + width
    else:
        begin = tl.load(starts + first_run + run).to(tl.int32)
        end = tl.load(starts + first_run + run + 1).to(tl.int32)
    first = begin + offset
    return begin, first, tl.minimum(first + TILE_ROWS, end), run * width + offset


@triton.jit
def tile_queries(
    positions,
    slots,
    slot,
    ragged,  # whether a run may have dead rows: starts of runs, or None
    first,
    stop,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """Rows x heads of one tile along one axis; absent ones repeat the first row, at -1.

    Returns each query's position (int32; rows of another slot are dead: -1), its index in
    [num_rows * heads] from the tile's first one on (int32), that first one (int64), and the
    elements' places in [heads, HEAD_DIM] from there on with their mask, both in the shape of
    the accumulators.
    """
    query = tl.arange(0, BLOCK_QUERIES)
    row = first + query // GROUP
    present = (row < stop) & (query < BLOCK_QUERIES // GROUP * GROUP)
    row = tl.where(present, row, first)
    live = present
    if ragged is not None:
        live = present & (tl.load(slots + row) == slot)
    position = tl.where(live, tl.load(positions + row), -1).to(tl.int32)
    # A wide scalar and narrow vectors: wide vectors would fill the registers.
    heads = tl.num_programs(1) * GROUP
    first_index = first.to(tl.int64) * heads + tl.program_id(1) * GROUP
    index = (row - first) * heads + query % GROUP
    dim = per_element(tl.arange(0, BLOCK_DIM), KV_LEFT)
    at = per_query(index, KV_LEFT) * HEAD_DIM + dim
    mask = per_query(present, KV_LEFT) & (dim < HEAD_DIM)
    return position, index, first_index, at, mask

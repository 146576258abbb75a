# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
"""Which rows and heads a program of attention serves."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(width, TILE_ROWS: tl.constexpr):
    """First row of this program's query tile, and where the tile or its window ends."""
    tiles_per_window = tl.cdiv(width, TILE_ROWS)
    window_first = (tl.program_id(0) // tiles_per_window) * width
    first = window_first + (tl.program_id(0) % tiles_per_window) * TILE_ROWS
    return first, tl.minimum(first + TILE_ROWS, window_first + width)


@triton.jit
def tile_queries(
    positions,
    first,
    stop,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """Rows x heads of one tile along one axis; absent ones repeat the first row, at -1.

    Returns each query's row, whether it is present, its position, its index in
    [num_rows * heads], and the mask of its elements [BLOCK_DIM, queries].
    """
    query = tl.arange(0, BLOCK_QUERIES)
    row = first + query // GROUP
    present = (row < stop) & (query < BLOCK_QUERIES // GROUP * GROUP)
    row = tl.where(present, row, first)
    position = tl.where(present, tl.load(positions + row), -1)
    index = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * GROUP + query % GROUP
    mask = present[None, :] & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[:, None]
    return row, present, position, index, mask

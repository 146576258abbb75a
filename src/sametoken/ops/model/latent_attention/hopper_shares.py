"""Which query tiles, KV tiles and splits a program computes, in Gluon, whatever its arithmetic.

A query tile is a range of a run's rows x heads, whatever row it begins in. ``runs`` are a launch's:
the first, the most rows of one, query tiles of each, and of all.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sametoken.ops.model.attention.hopper_kernels import added
from sametoken.ops.model.attention.hopper_tiles import rows_of_run
from sametoken.ops.model.attention.schedule import own_part
from sametoken.ops.model.latent_attention.hopper_tiles import TILE


@gluon.jit
def end_tile(position, first, num_queries, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """The KV tile after the last that a query tile sees, of a run that begins at ``position``.

    Dead rows at a run's end count too: they read vectors and give nothing.
    """
    last_row = (gl.minimum(first + QUERIES, num_queries) - 1) // HEADS
    return (position + last_row + TILE) // TILE


@gluon.jit
def tile_of(tile, starts, runs, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """The first row of a tile's run, the tile's first query in it, and the run's queries.

    A tile exists if its first query is one of the run's.
    """
    first_run, width, tiles_per_run, _ = runs
    begin, stop = rows_of_run(first_run + tile // tiles_per_run, starts, width)
    return begin, tile % tiles_per_run * QUERIES, (stop - begin) * HEADS


@gluon.jit
def own_splits(
    positions, begin, first, num_queries, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """Of a query tile whose KV tiles begin at ``start`` of the line: its run's first position,
    their number, and the first of its splits in ``low .. high - 1``, the one after their last and
    the one after its last (``own_part``).
    """
    position = gl.load(positions + begin).to(gl.int32)
    end = end_tile(position, first, num_queries, HEADS, QUERIES)
    split, last, after = own_part(low - start, high - start, 0, end, TILE)
    return position, end, split, last, after


@gluon.jit
def _each_added(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def own_share(
    positions, slots, starts, runs,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """This program's equal part ``low .. high - 1`` of the line of all query tiles' KV tiles.

    Returns the query tile that it begins in, that tile's slot, where its KV tiles begin, low and
    high; of an empty line's end, tile ``num_tiles``. No vector is loaded before: it is short.
    """
    first_run, width, tiles_per_run, num_tiles = runs
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.arange(0, BLOCK_TILES, layout=LINE)
    run = first_run + gl.minimum(tile, num_tiles - 1) // tiles_per_run
    begin, stop = rows_of_run(run, starts, width)
    first, num_queries = tile % tiles_per_run * QUERIES, (stop - begin) * HEADS
    exists = (tile < num_tiles) & (first < num_queries)
    position = gl.load(positions + begin, mask=exists, other=0).to(gl.int32)
    slot = gl.load(slots + begin, mask=exists, other=0)
    # No slot is below 0: the comparison has both loads in flight together.
    exists = exists & (slot >= 0)
    length = gl.where(exists, end_tile(position, first, num_queries, HEADS, QUERIES), 0)
    ends = gl.associative_scan(length, 0, added)
    # Parts are proportional, so that runs of one length are parted at their borders.
    total, program, programs = gl.sum(length, 0), gl.program_id(0), gl.num_programs(0)
    low = (program * total + programs - 1) // programs
    high = ((program + 1) * total + programs - 1) // programs
    start = ends - length
    own = (start <= low) & (low < ends)
    behind, start, slot = gl.reduce(
        (gl.where(own, tile - num_tiles, 0), gl.where(own, start, 0), gl.where(own, slot, 0)),
        0, _each_added,
    )  # fmt: skip
    return num_tiles + behind, slot, start, low, high

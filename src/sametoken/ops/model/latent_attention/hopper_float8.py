"""Float8 vectors on Hopper, in Gluon: warps of their own widen them where they lie.

Products of 16 bits read vectors of 16 bits. Float8 ones land in the upper half of their slot's
memory. Part by part, 64 elements of each position, they are read and stored in the queries' dtype,
from the slot's beginning on, so that none covers a part that is not read yet. Every number of e4m3
is one of 16 bits, so the kernels' other warps see what vectors of 16 bits would have shown them.

A barrier of a slot, ``landed``, comes before ``full`` then: TMA arrives there, and these warps at
``full``, once for each half of a latent.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sametoken.ops.model.attention.hopper_float8 import COLUMNS, widen
from sametoken.ops.model.attention.schedule import begin_of
from sametoken.ops.model.latent_attention.hopper_shares import own_splits, tile_of
from sametoken.ops.model.latent_attention.hopper_tiles import HALF, TILE


@gluon.jit
def _widen_tiles(
    ring, landed, full, count, num_tiles, SLOTS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Widen ``num_tiles`` tiles of vectors, after ``count`` others."""
    low, high, keys = ring
    PARTS: gl.constexpr = HALF // COLUMNS
    for tile in range(num_tiles):
        slot, phase = (count + tile) % SLOTS, ((count + tile) // SLOTS) & 1
        mbarrier.wait(landed[0].index(slot), phase)
        widen(low, slot, TILE, PARTS, WARPS)
        fence_async_shared()
        mbarrier.arrive(full[0].index(slot), count=1)
        mbarrier.wait(landed[1].index(slot), phase)
        widen(high, slot, TILE, PARTS, WARPS)
        widen(keys, slot, TILE, 1, WARPS)
        fence_async_shared()
        mbarrier.arrive(full[1].index(slot), count=1)


@gluon.jit
def widen_all(ring, landed, full, num_tiles, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """The widening warp group of a program's ``num_tiles``; of 16 bits a warp without work.

    ``landed`` and ``full`` are each of the lower half of a latent, and of all else.
    """
    if WARPS:
        _widen_tiles(ring, landed, full, 0 * num_tiles, num_tiles, SLOTS, WARPS)


@gluon.jit
def widen_by_splits(
    positions, starts, ring, landed, full, runs, tile, start, low, high,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As ``widen_all``, of the tiles that the loading warp of kernels of splits loads."""
    if WARPS:
        _, _, _, num_tiles = runs
        count = 0
        while (tile < num_tiles) & (start < high):
            begin, first, num_queries = tile_of(tile, starts, runs, HEADS, QUERIES)
            if first < num_queries:
                _, end, split, last, _ = own_splits(
                    positions, begin, first, num_queries, start, low, high, HEADS, QUERIES
                )
                if split < last:
                    own = min(begin_of(last) // TILE, end) - begin_of(split) // TILE
                    _widen_tiles(ring, landed, full, count, own, SLOTS, WARPS)
                    count += own
                start += end
            tile += 1

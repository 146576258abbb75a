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

from sametoken.ops.hopper_layouts import swizzled
from sametoken.ops.model.attention.schedule import begin_of
from sametoken.ops.model.latent_attention.hopper_shares import own_splits, tile_of
from sametoken.ops.model.latent_attention.hopper_tiles import HALF, TILE

#: Elements of a part, whose lines have 64 bytes of float8, and parts in registers at once.
COLUMNS = gl.constexpr(64)
AT_ONCE = gl.constexpr(2)


@gluon.jit
def _widen(memory, slot, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Widen the elements of a slot, PARTS x 64 of each position, in their place."""
    DTYPE: gl.constexpr = memory.dtype
    # The parts of all slots, and of float8 twice as many.
    COUNT: gl.constexpr = memory.shape[0] * memory.shape[1] // TILE
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = swizzled(gl.float8e4nv, 2, COLUMNS)
    narrow = memory._reinterpret(gl.float8e4nv, [2 * COUNT, TILE, COLUMNS], NARROW)
    wide = memory._reinterpret(DTYPE, [COUNT, TILE, COLUMNS], swizzled(DTYPE))
    for first in gl.static_range(0, PARTS, AT_ONCE):
        parts = ()
        for part in gl.static_range(first, min(first + AT_ONCE, PARTS)):
            parts += (narrow.index((2 * slot + 1) * PARTS + part).load(LINES),)
        for part in gl.static_range(first, min(first + AT_ONCE, PARTS)):
            # By way of fp32: the one instruction from fp16 to bf16 is slower than two.
            wide.index(slot * PARTS + part).store(parts[part - first].to(gl.float32).to(DTYPE))


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
        _widen(low, slot, PARTS, WARPS)
        fence_async_shared()
        mbarrier.arrive(full[0].index(slot), count=1)
        mbarrier.wait(landed[1].index(slot), phase)
        _widen(high, slot, PARTS, WARPS)
        _widen(keys, slot, 1, WARPS)
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

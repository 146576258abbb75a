"""Float8 keys and values on Hopper, in Gluon: warps of their own widen them where they lie.

Products of 16 bits read tiles of 16 bits. Float8 ones land in the upper half of their slot's memory
and are stored in the queries' dtype from the slot's beginning on; what is overwritten was read
before. Every number of e4m3 is one of 16 bits, so the other warps see what tiles of 16 bits would
have shown them. A barrier of a slot, ``landed``, comes before ``full`` then.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sametoken.ops.hopper_layouts import swizzled
from sametoken.ops.model.attention.hopper_tiles import extent, own_tiles, run_of

#: Elements of a part, whose lines have 64 bytes of float8.
COLUMNS = gl.constexpr(64)


@gluon.jit
def widen(memory, slot, TILE: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Widen a slot's TILE positions of PARTS x 64 elements in their place."""
    DTYPE: gl.constexpr = memory.dtype
    # The parts of all slots, and of float8 twice as many.
    COUNT: gl.constexpr = memory.shape[0] * memory.shape[1] // TILE
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = swizzled(gl.float8e4nv, 2, COLUMNS)
    narrow = memory._reinterpret(gl.float8e4nv, [2 * COUNT, TILE, COLUMNS], NARROW)
    wide = memory._reinterpret(DTYPE, [COUNT, TILE, COLUMNS], swizzled(DTYPE))
    for part in gl.static_range(PARTS):
        numbers = narrow.index((2 * slot + 1) * PARTS + part).load(LINES)
        # By way of fp32: the one instruction from fp16 to bf16 is slower than two.
        wide.index(slot * PARTS + part).store(numbers.to(gl.float32).to(DTYPE))


@gluon.jit
def _widen_tiles(
    ring, landed, full, count, num_tiles, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Widen ``num_tiles`` tiles of keys and of values, after ``count`` others of each."""
    for use in range(2 * count, 2 * (count + num_tiles)):
        slot = use % SLOTS
        mbarrier.wait(landed.index(slot), (use // SLOTS) & 1)
        widen(ring, slot, TILE, BLOCK_DIM // COLUMNS, WARPS)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def widen_all(
    ring, landed, full, num_tiles, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The widening warps of a program's ``num_tiles``; of 16 bits a warp without work."""
    if WARPS:
        count = 0 * num_tiles
        _widen_tiles(ring, landed, full, count, num_tiles, TILE, BLOCK_DIM, SLOTS, WARPS)


@gluon.jit
def widen_by_splits(
    positions, starts, ring, landed, full, first_run, width, tiles_per_run, num_tiles,
    tile, start, low, high, ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_DIM: gl.constexpr,
    WINDOW: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As ``widen_all``, of what the loading warp of ``splits_kernel`` loads."""
    if WARPS:
        count = 0
        while start < high:
            _, first, stop = run_of(tile, starts, first_run, width, tiles_per_run, ROWS)
            if first < stop:
                position = gl.load(positions + first).to(gl.int32)
                first_split, end, before = extent(position, stop - first, TILE, WINDOW)
                shift = before - start
                split, last, _, kv, stop_kv = own_tiles(
                    low + shift, high + shift, first_split, before, end, TILE, WINDOW
                )
                if split < last:
                    own = stop_kv - kv
                    _widen_tiles(ring, landed, full, count, own, TILE, BLOCK_DIM, SLOTS, WARPS)
                    count += own
                start += end - before
            tile = (tile + 1) % num_tiles

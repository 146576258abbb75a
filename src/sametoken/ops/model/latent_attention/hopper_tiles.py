"""Query tiles over latent vectors on Hopper, in Gluon: the arithmetic of 16 or 32 queries a tile.

Positions are the rows of each product and queries its columns. A tile of 64 positions is the left
operand of both, scores ``[64, queries]`` and weighted latents ``[512, queries]``, so few queries
fill the matrix units and a program needs no more columns than it has queries. A query's sums stay
in its column, so the number of columns changes no bit. ``hopper_pair_tiles`` has the same sums in
the same order for 64 queries.

A warp loads tiles, one warp group scores them (``weigh_split``) and two more sum them, half of a
latent each (``sum_split``), all in one order. The tile after ``count`` others has slot
``count % SLOTS``, and each barrier of a slot completes one phase a tile:

- ``full``: the tile's vectors are there. The loader sends them once the slot's former tile is free.
- ``ready``: the tile's weights and the factors of the sums before it are there. The scoring group
  arrives after its last read of the vectors.
- ``free``: the sums hold the tile. Both summing groups arrive after their last read of the slot,
  and nothing of the slot is needed any more: vectors, weights and factors.

So ``full`` also says that the slot's weights may be replaced. The loader waits for the summing
groups alone, those for the scoring group, and that for the loader, each for an earlier step of the
others: the scoring group is at most ``SLOTS`` tiles ahead, and none waits for ever.

Where results of splits are joined here, the scoring group sends the factors (``send_end``). It has
scored a split's last tile then, so that the tile two before is free: the summing groups are past
the end of the third split before, whose place the factors take (``ENDS``).

Splits follow ``attention.schedule``; in a split, tiles run in order through an online softmax, and
splits are joined in order by ``joined``. A tile or a split that a query cannot see leaves it
unchanged to the bit. Latents in memory are finite (``rope_and_cache``), so weight 0 hides them.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import load_box, new_barriers, products, swizzled
from sametoken.ops.model.attention.hopper_sums import LOWEST, hidden, softmax

#: Positions of a tile, which affect bits.
TILE = gl.constexpr(64)
#: Elements of a latent, of one of the two halves that it is kept in, and of a rotated key.
RANK = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(576)
#: Ends of splits in shared memory, one more than tiles.
ENDS = gl.constexpr(3)


@gluon.jit
def rows_of_tile(table, last_block, tile, BLOCK_SIZE: gl.constexpr):
    """The first vector of each box of a tile: a box has at most 64 positions of one block."""
    BOX: gl.constexpr = min(BLOCK_SIZE, 64)
    rows = ()
    for box in gl.static_range(TILE // BOX):
        at = tile * TILE + box * BOX
        block = gl.load(table + min(at // BLOCK_SIZE, last_block)).to(gl.int32)
        rows += (block * BLOCK_SIZE + at % BLOCK_SIZE,)
    return rows


@gluon.jit
def _as_landed(memory, DTYPE: gl.constexpr):
    """The slots' memory as boxes of vectors of a dtype, of float8 twice as many."""
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    SHAPE: gl.constexpr = [memory.shape[0] * 2 // BYTES, memory.shape[1], 64]
    return memory._reinterpret(DTYPE, SHAPE, swizzled(DTYPE, 2, 64 * BYTES))


@gluon.jit
def landing(ring, vectors):
    """Boxes of the slots' memory, lower halves, upper halves and keys, as vectors land in them."""
    low, high, keys = ring
    return (
        _as_landed(low, vectors.dtype), _as_landed(high, vectors.dtype),
        _as_landed(keys, vectors.dtype),
    )  # fmt: skip


@gluon.jit
def landing_slot(slot, vectors):
    """A slot among those of the vectors' dtype: of float8 the upper half (``hopper_float8``)."""
    TURNS: gl.constexpr = 16 // vectors.dtype.primitive_bitwidth
    return slot * TURNS + TURNS - 1


@gluon.jit
def load_tiles(
    vectors, table, last_block, final, begin, end, count, ring, full, free,
    BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load KV tiles ``begin .. end - 1`` in turn; returns tiles loaded so far.

    Tiles below position ``final`` were written by earlier passes: only the others wait for the
    kernel before. Blocks are looked up before the wait for a slot, which hides it.
    """
    BOXES: gl.constexpr = TILE // min(BLOCK_SIZE, 64)
    low, high, keys = landing(ring, vectors)
    for tile in range(begin, end):
        if PDL and (tile + 1) * TILE > final:
            cuda.gdc_wait()
        rows = rows_of_tile(table, last_block, tile, BLOCK_SIZE)
        slot = count % SLOTS
        filled, at = full.index(slot), landing_slot(slot, vectors)
        mbarrier.wait(free.index(slot), ((count // SLOTS) & 1) ^ 1)
        mbarrier.expect(filled, TILE * WIDTH * (vectors.dtype.primitive_bitwidth // 8))
        for box in gl.static_range(BOXES):
            for part in gl.static_range(HALF // 64):
                place = (at * (HALF // 64) + part) * BOXES + box
                load_box(vectors, [rows[box], part * 64], filled, low.index(place))
                load_box(vectors, [rows[box], HALF + part * 64], filled, high.index(place))
            load_box(vectors, [rows[box], RANK], filled, keys.index(at * BOXES + box))
        count += 1
    return count


@gluon.jit
def _load_columns(q, memory, num_columns, BEGIN: gl.constexpr):
    """Load elements from ``BEGIN`` of adjacent queries into shared memory; 0 beyond the last."""
    SIZE: gl.constexpr = memory.shape[1]
    LANES: gl.constexpr = min(SIZE // 8, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    query = gl.arange(0, memory.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    at = query[:, None] * WIDTH + BEGIN + dim[None, :]
    mask = (query < num_columns)[:, None] & (dim < SIZE)[None, :]
    memory.store(gl.load(q + at, mask=mask, other=0.0))


@gluon.jit
def load_queries(q, queries, num_columns):
    """Load adjacent queries from ``q`` on into shared memory."""
    low, high, rope = queries
    _load_columns(q, low, num_columns, 0)
    _load_columns(q, high, num_columns, HALF)
    _load_columns(q, rope, num_columns, RANK)
    fence_async_shared()


@gluon.jit
def _scores(queries, low, high, keys):
    """Products [TILE, queries] of a tile's vectors and the queries."""
    QUERIES: gl.constexpr = queries[0].shape[0]
    none = gl.zeros([TILE, QUERIES], gl.float32, products(QUERIES))
    q_low, q_high, q_rope = queries
    token = warpgroup_mma(low, q_low.permute((1, 0)), none, use_acc=False, is_async=True)
    token = warpgroup_mma(high, q_high.permute((1, 0)), token, is_async=True)
    token = warpgroup_mma(keys, q_rope.permute((1, 0)), token, is_async=True)
    return warpgroup_mma_wait(0, deps=(token,))


@gluon.jit
def weigh_split(queries, tiles, exchanged, barriers, count, begin, end, seen, uncut_end, scale):
    """The weights of one split, tiles ``begin .. end - 1``, of a query tile, by a warp group.

    ``count`` tiles of this program came before. Returns the total weights and the maximum scores
    [queries].
    """
    QUERIES: gl.constexpr = queries[0].shape[0]
    SLOTS: gl.constexpr = tiles[0].shape[0]
    lows, highs, keys = tiles
    shared, shrinks = exchanged
    full, ready, _ = barriers
    top = gl.full([QUERIES], LOWEST, gl.float32, seen.type.layout)
    # Weights are summed apart for even and odd tiles.
    newer = gl.zeros([TILE, QUERIES], gl.float32, products(QUERIES))
    older = newer
    for tile in range(begin, end):
        slot = count % SLOTS
        mbarrier.wait(full.index(slot), (count // SLOTS) & 1)
        scores = _scores(queries, lows.index(slot), highs.index(slot), keys.index(slot))
        scores = hidden(scores, tile, seen, None, uncut_end, 0, True)
        weights, top, shrink = softmax(scores, top, scale, True)
        shrinks.index(slot).store(shrink)
        shared.index(slot).permute((1, 0)).store(weights.to(shared.dtype))
        fence_async_shared()
        mbarrier.arrive(ready.index(slot), count=1)
        totals = gl.fma(older, shrink[None, :], weights)
        newer, older = totals, newer * shrink[None, :]
        count += 1
    return gl.sum(newer, 0) + gl.sum(older, 0), top


@gluon.jit
def sum_split(latents, exchanged, barriers, count, begin, end):
    """Half of the weighted latents of one split, tiles ``begin .. end - 1``, by a warp group.

    ``latents`` is that half of the tiles, ``count`` tiles of this program came before. Returns
    [256, queries].
    """
    shared, shrinks = exchanged
    QUERIES: gl.constexpr = shared.shape[1]
    SLOTS: gl.constexpr = latents.shape[0]
    SUMS: gl.constexpr = products(QUERIES)
    full, ready, free = barriers
    sums = gl.zeros([HALF, QUERIES], gl.float32, SUMS)
    for _ in range(begin, end):
        slot, phase = count % SLOTS, (count // SLOTS) & 1
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(ready.index(slot), phase)
        # Where no maximum grew the factors are 1, and the sums are left alone.
        factor = shrinks.index(slot).load(gl.SliceLayout(0, SUMS))
        if gl.min(factor, 0) < 1.0:
            sums = sums * factor[None, :]
        weights = shared.index(slot).permute((1, 0))
        token = warpgroup_mma(latents.index(slot).permute((1, 0)), weights, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(free.index(slot), count=1)
        count += 1
    return sums


@gluon.jit
def divisor_of(total, vector_scale):
    """What divides weighted sums of vectors as they are stored: outputs follow; 1 for no weight."""
    total = gl.where(total == 0.0, 1.0, total)
    return total if vector_scale is None else total / gl.load(vector_scale)


@gluon.jit
def send_end(ends, count, old, new, total):
    """Send the factors of sums so far and of a split's, and the total weight of both, [queries].

    ``count`` of this program came before.
    """
    values, sent = ends
    slot = count % ENDS
    values.index(slot * 3).store(old)
    values.index(slot * 3 + 1).store(new)
    values.index(slot * 3 + 2).store(total)
    mbarrier.arrive(sent.index(slot), count=1)


@gluon.jit
def factors_of(ends, count):
    """The factors of ``send_end``, [queries] each, once they are there."""
    values, sent = ends
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, products(values.shape[1]))
    slot = count % ENDS
    mbarrier.wait(sent.index(slot), (count // ENDS) & 1)
    return values.index(slot * 3).load(BY_QUERY), values.index(slot * 3 + 1).load(BY_QUERY)


@gluon.jit
def total_of(ends, count):
    """The total weight, [queries], that came with the factors."""
    values, _ = ends
    return values.index(count % ENDS * 3 + 2).load(gl.SliceLayout(0, products(values.shape[1])))


@gluon.jit
def ring_of(DTYPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr):
    """Shared memory of vectors, lower halves, upper halves and keys: as boxes, and as tiles."""
    LAYOUT: gl.constexpr = swizzled(DTYPE)
    BOX: gl.constexpr = min(BLOCK_SIZE, 64)
    BOXES: gl.constexpr = SLOTS * (TILE // BOX)
    PARTS: gl.constexpr = HALF // 64
    low = gl.allocate_shared_memory(DTYPE, [BOXES * PARTS, BOX, 64], LAYOUT)
    high = gl.allocate_shared_memory(DTYPE, [BOXES * PARTS, BOX, 64], LAYOUT)
    keys = gl.allocate_shared_memory(DTYPE, [BOXES, BOX, 64], LAYOUT)
    tiles = (
        low._reinterpret(DTYPE, [SLOTS, TILE, HALF], LAYOUT),
        high._reinterpret(DTYPE, [SLOTS, TILE, HALF], LAYOUT),
        keys._reinterpret(DTYPE, [SLOTS, TILE, ROPE], LAYOUT),
    )
    return (low, high, keys), tiles


@gluon.jit
def memory_of(
    q, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, SLOTS: gl.constexpr,
    WIDEN_WARPS: gl.constexpr,
):  # fmt: skip
    """A program's shared memory: queries, vectors as boxes and as tiles, what the groups exchange
    by slot (weights, and factors of the sums before), and barriers by slot (full, ready, free).
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    LAYOUT: gl.constexpr = swizzled(DTYPE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = (
        gl.allocate_shared_memory(DTYPE, [QUERIES, HALF], LAYOUT),
        gl.allocate_shared_memory(DTYPE, [QUERIES, HALF], LAYOUT),
        gl.allocate_shared_memory(DTYPE, [QUERIES, ROPE], LAYOUT),
    )
    ring, tiles = ring_of(DTYPE, BLOCK_SIZE, SLOTS)
    exchanged = (
        gl.allocate_shared_memory(DTYPE, [SLOTS, QUERIES, TILE], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [SLOTS, QUERIES], FLAT),
    )
    full = new_barriers(SLOTS, 2 if WIDEN_WARPS else 1)
    barriers = (full, new_barriers(SLOTS, 1), new_barriers(SLOTS, 2))
    return queries, ring, tiles, exchanged, barriers


@gluon.jit
def memory_of_ends(QUERIES: gl.constexpr):
    """A program's shared memory for ``send_end``: factors and total weights, and barriers.

    For programs that send: the compiler gives the memory of an unused barrier away, and what is
    stored there changes when another process's turn on the GPU interrupts the program.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [3 * ENDS, QUERIES], FLAT), new_barriers(ENDS, 1)

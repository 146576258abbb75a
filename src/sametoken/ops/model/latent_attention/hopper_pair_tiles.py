"""Tiles of 64 queries over latent vectors on Hopper, in Gluon, by a pair of warp groups.

Queries are the rows of both products, and each group keeps 256 of the 512 columns of the weighted
latents in registers, so no sum leaves them in a split. The groups take KV tiles in turns: group 0
the even ones of a split, group 1 the odd ones. A group computes its tile's scores and weights from
whole vectors, multiplies them by its half of the latents, and lets the other multiply them by the
other half. While one computes weights, products of the other fill the matrix units.

Bits are those of ``hopper_tiles``: tiles run in order through an online softmax, and weights are
summed per position, for even and odd tiles apart, then as ``_total`` says.
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

from sametoken.ops.hopper_layouts import load_box, products
from sametoken.ops.model.attention.hopper_sums import LOWEST, hidden
from sametoken.ops.model.latent_attention.hopper_tiles import (
    HALF,
    RANK,
    ROPE,
    TILE,
    WIDTH,
    landing,
    landing_slot,
    rows_of_tile,
)

#: Queries of a tile.
QUERIES = gl.constexpr(64)
#: Tiles of vectors that shared memory holds beside the queries.
SLOTS = gl.constexpr(2)
#: Boxes of 64 elements of a half.
PARTS = gl.constexpr(4)
#: Registers of scores [64, 64] of a warp group, of its sums [64, 256], and of a number a query.
SCORES = gl.constexpr(products(64))
SUMS = gl.constexpr(products(256))
ROWS = gl.constexpr(gl.SliceLayout(1, products(64)))


@gluon.jit
def _load_half(vectors, rows, slot, filled, half, BEGIN: gl.constexpr, BOXES: gl.constexpr):
    """Load 256 elements of a tile's vectors, whose boxes begin at ``rows``, into a slot."""
    for box in gl.static_range(BOXES):
        for part in gl.static_range(PARTS):
            place = (slot * PARTS + part) * BOXES + box
            load_box(vectors, [rows[box], BEGIN + part * 64], filled, half.index(place))


@gluon.jit
def _load_tile(
    vectors, table, last_block, tile, count, ring, barriers, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Load a KV tile, after ``count`` others: each half as soon as its place is free."""
    BOXES: gl.constexpr = TILE // min(BLOCK_SIZE, 64)
    BYTES: gl.constexpr = vectors.dtype.primitive_bitwidth // 8
    low, high, keys = landing(ring, vectors)
    full, free = barriers[6], barriers[1]
    slot, phase = count % SLOTS, ((count // SLOTS) & 1) ^ 1
    at = landing_slot(slot, vectors)
    # Blocks are looked up before the wait, which hides it.
    rows = rows_of_tile(table, last_block, tile, BLOCK_SIZE)
    mbarrier.wait(free[0].index(slot), phase)
    mbarrier.expect(full[0].index(slot), TILE * HALF * BYTES)
    _load_half(vectors, rows, at, full[0].index(slot), low, 0, BOXES)
    mbarrier.wait(free[1].index(slot), phase)
    mbarrier.expect(full[1].index(slot), TILE * (HALF + ROPE) * BYTES)
    _load_half(vectors, rows, at, full[1].index(slot), high, HALF, BOXES)
    for box in gl.static_range(BOXES):
        place = keys.index(at * BOXES + box)
        load_box(vectors, [rows[box], RANK], full[1].index(slot), place)


@gluon.jit
def _load_queries(q, first_query, turn, boxes, full, free):
    """Load a query tile, after ``turn`` others, and what follows its run: a row meets no other."""
    BYTES: gl.constexpr = q.dtype.primitive_bitwidth // 8
    low, high, rope = boxes
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)
    mbarrier.expect(full.index(0), QUERIES * WIDTH * BYTES)
    for part in gl.static_range(PARTS):
        load_box(q, [first_query, part * 64], full.index(0), low.index(part))
        load_box(q, [first_query, HALF + part * 64], full.index(0), high.index(part))
    load_box(q, [first_query, RANK], full.index(0), rope.index(0))


@gluon.jit
def load_tiles(
    q, vectors, table, last_block, first_query, final, begin, end, count, turn, boxes, ring,
    barriers, BLOCK_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load a query tile and its KV tiles ``begin .. end - 1``; returns KV tiles loaded so far.

    KV tiles below position ``final`` were written by earlier passes: only the others, and queries,
    wait for the kernel before. So queries come second.
    """
    for tile in range(begin, end):
        if PDL and (tile + 1) * TILE > final:
            cuda.gdc_wait()
        _load_tile(vectors, table, last_block, tile, count, ring, barriers, BLOCK_SIZE)
        count += 1
        if tile == min(begin + 1, end - 1):
            if PDL:
                cuda.gdc_wait()
            _load_queries(q, first_query, turn, boxes, barriers[2], barriers[3])
    return count


@gluon.jit
def _total(sums):
    """Sums [64, 64] over positions, in the order of positions as rows: bits 3, 2, 1, 0, 5, 4.

    So ``gl.sum`` adds the rows of ``hopper_tiles``: in a thread, in a warp, then over warps.
    """
    sums = sums.reshape([QUERIES, 4, 2, 2, 2, 2])
    for _ in gl.static_range(4):
        sums = gl.sum(sums, 2)
    sums = gl.sum(sums.reshape([QUERIES, 2, 2]), 1)
    return gl.convert_layout(gl.sum(sums, 1), ROWS)


@gluon.jit
def _scores(queries, tiles, full, count):
    """Issue the scores of the tile after ``count`` others as its halves arrive: three groups."""
    lows, highs, keys = tiles
    slot, phase = count % SLOTS, (count // SLOTS) & 1
    # An index that the compiler does not know: it would keep 36 addresses, and spill.
    zero = count >> 30
    none = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    mbarrier.wait(full[0].index(slot), phase)
    low = lows.index(slot).permute((1, 0))
    token = warpgroup_mma(queries[0].index(zero), low, none, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(slot), phase)
    high, key = highs.index(slot).permute((1, 0)), keys.index(slot).permute((1, 0))
    token = warpgroup_mma(queries[1].index(zero), high, token, is_async=True)
    return warpgroup_mma(queries[2].index(zero), key, token, is_async=True)


@gluon.jit
def _scaled(sums, factor):
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _add_other(sums, totals, top, memory, count, others, scale, ME: gl.constexpr):
    """Issue one product: the other group's weights of the tile after ``count`` others, times this
    group's half. Totals and maximum follow that tile; ``others`` such tiles came before.
    """
    _, weights, tops, _, tiles, barriers = memory
    full, ready = barriers[0], barriers[4]
    OTHER: gl.constexpr = 1 - ME
    slot = count % SLOTS
    mbarrier.wait(ready.index(OTHER), others & 1)
    mbarrier.wait(full[ME].index(slot), (count // SLOTS) & 1)
    new_top = tops.index(OTHER).load(ROWS)
    shrink = gl.exp2((top - new_top) * scale)
    totals = totals * shrink[:, None]
    token = warpgroup_mma(weights, tiles[ME].index(slot), _scaled(sums, shrink), is_async=True)
    return token, totals, new_top


@gluon.jit
def _add_own(
    sums, totals, top, scores, memory, tile, count, seen, uncut_end, scale, ME: gl.constexpr
):  # fmt: skip
    """Turn scores into weights, hand them to the other group, and multiply them by this half."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    _, shared, tops, _, tiles, barriers = memory
    free, ready = barriers[1], barriers[4]
    slot = count % SLOTS
    scores = hidden(scores, tile, seen, None, uncut_end, 0, False)
    new_top = gl.maximum(top, gl.max(scores, 1))
    shrink = gl.exp2((top - new_top) * scale)
    tops.index(ME).store(new_top)
    weights = gl.exp2(gl.fma(scores, scale, -(new_top * scale)[:, None]))
    totals = gl.fma(totals, shrink[:, None] + gl.zeros_like(totals), weights)
    weights = weights.to(shared.dtype)
    shared.store(weights)
    fence_async_shared()
    mbarrier.arrive(ready.index(ME))
    left = gl.convert_layout(weights, LEFT)
    token = warpgroup_mma(left, tiles[ME].index(slot), _scaled(sums, shrink), is_async=True)
    sums, left = warpgroup_mma_wait(0, deps=(token, left))
    mbarrier.arrive(free[ME].index(slot))
    return sums, totals, new_top


@gluon.jit
def _add_both(
    sums, totals, top, memory, tile, count, others, seen, uncut_end, scale, ME: gl.constexpr
):  # fmt: skip
    """The other group's tile before ``tile``, then this group's ``tile``, after ``count`` others.

    The other's weights come first: they are there, since the other began before.
    """
    queries, _, _, _, tiles, barriers = memory
    full, free = barriers[0], barriers[1]
    other, totals, top = _add_other(
        sums, totals, top, memory, count - 1, others, scale, ME
    )  # fmt: skip
    token = _scores(queries, tiles, full, count)
    # Scores are the three products issued last.
    sums = warpgroup_mma_wait(3, deps=(other,))
    mbarrier.arrive(free[ME].index((count - 1) % SLOTS))
    scores = warpgroup_mma_wait(0, deps=(token,))
    return _add_own(sums, totals, top, scores, memory, tile, count, seen, uncut_end, scale, ME)


@gluon.jit
def attend_split(
    memory, begin, end, count, others, seen, uncut_end, scale, ME: gl.constexpr
):  # fmt: skip
    """One split, tiles ``begin .. end - 1``, of a query tile, by warp group ME.

    Args:
        count: KV tiles of this program before the split.
        others: tiles that this group had from the other before it.

    Returns this group's half of the weighted latents [64, 256], the total weights [64] of its own
    tiles, the maximum scores [64] of both groups', and ``others`` after the split.
    """
    queries, _, _, _, tiles, barriers = memory
    full, free = barriers[0], barriers[1]
    num_tiles = end - begin
    sums = gl.zeros([QUERIES, HALF], gl.float32, SUMS)
    totals = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    top = gl.full([QUERIES], LOWEST, gl.float32, ROWS)
    if ME == 0:
        token = _scores(queries, tiles, full, count)
        scores = warpgroup_mma_wait(0, deps=(token,))
        sums, totals, top = _add_own(
            sums, totals, top, scores, memory, begin, count, seen, uncut_end, scale, ME
        )
    elif num_tiles > 1:
        # A loop that began with sums of 0 would wait for scores before it rescales them.
        sums, totals, top = _add_both(
            sums, totals, top, memory, begin + 1, count + 1, others, seen, uncut_end, scale, ME
        )
        others += 1
    for place in range(2 + ME, num_tiles, 2):
        sums, totals, top = _add_both(
            sums, totals, top, memory, begin + place, count + place, others, seen, uncut_end,
            scale, ME,
        )  # fmt: skip
        others += 1
    if num_tiles % 2 == ME:
        last = count + num_tiles - 1
        other, totals, top = _add_other(sums, totals, top, memory, last, others, scale, ME)
        sums = warpgroup_mma_wait(0, deps=(other,))
        mbarrier.arrive(free[ME].index(last % SLOTS))
        others += 1
    return sums, _total(totals), top, others


@gluon.jit
def total_of(own, memory, splits_done, ME: gl.constexpr):
    """Total weights [64] of both groups' tiles of a split; ``splits_done`` splits came before.

    Two barriers in turns: a group may reach the next split before the other has left this.
    """
    shared, exchanged = memory[3], memory[5][5]
    buffer = splits_done & 1
    shared.index(ME * 2 + buffer).store(own)
    mbarrier.arrive(exchanged.index(ME * 2 + buffer))
    mbarrier.wait(exchanged.index((1 - ME) * 2 + buffer), (splits_done >> 1) & 1)
    return own + shared.index((1 - ME) * 2 + buffer).load(ROWS)

"""Few queries over KV tiles on Hopper, in Gluon: the arithmetic of ``splits_kernel``.

Positions are the rows of each product and queries its columns. A tile is the left operand of both,
scores [TILE, queries] and weighted values [BLOCK_DIM, queries], so a program computes no more
columns than it has queries: fewer exponentials and sums, which draw power, and registers for the
sums over all splits. Each sum has the order that it has where queries are rows
(``hopper_tiles.attend``), so a row has the same bits in both.
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

from sametoken.ops.hopper_layouts import barrier, products, swizzled
from sametoken.ops.model.attention.hopper_sums import LOWEST, joined
from sametoken.ops.model.attention.hopper_tiles import store_part, uncut_tiles
from sametoken.ops.model.attention.schedule import begin_of, split_of


@gluon.jit
def _multiply_keys(q_memory, tiles, full, use):
    """Begin the products of keys and queries, once the keys are there."""
    SLOTS: gl.constexpr = tiles.shape[0]
    TILE: gl.constexpr = tiles.shape[1]
    QUERIES: gl.constexpr = q_memory.shape[0]
    no_scores = gl.zeros([TILE, QUERIES], gl.float32, products(QUERIES))
    mbarrier.wait(full.index(use % SLOTS), (use // SLOTS) & 1)
    keys, queries = tiles.index(use % SLOTS), q_memory.permute((1, 0))
    return warpgroup_mma(keys, queries, no_scores, use_acc=False, is_async=True)


@gluon.jit
def _add_values(shared, tiles, full, use, acc):
    """Begin to add values by the weights of ``_share``, once the values are there."""
    SLOTS: gl.constexpr = tiles.shape[0]
    mbarrier.wait(full.index(use % SLOTS), (use // SLOTS) & 1)
    values = tiles.index(use % SLOTS).permute((1, 0))
    return warpgroup_mma(values, shared.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _share(weights, shared):
    """Give a tile's weights to all warps; no product reads those before any more."""
    barrier()
    shared.permute((1, 0)).store(weights.to(shared.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _hidden(
    scores, tile, seen, uncut, uncut_end, TILE: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Scores of one KV tile, without those that a query does not see; most tiles are seen whole."""
    if (tile >= uncut_end) | (tile < uncut):
        at = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, scores.type.layout))
        visible = at[:, None] <= seen[None, :]
        if WINDOW:
            visible = visible & (at[:, None] > seen[None, :] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _total_of(weights):
    """Total weights [queries] of [TILE, queries], added as where queries are rows.

    There four threads have a query's positions, eight apart, two neighbours each.
    """
    AS_ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    rows = gl.convert_layout(weights.permute((1, 0)), AS_ROWS)
    return gl.convert_layout(gl.sum(rows, 1), gl.SliceLayout(0, weights.type.layout))


@gluon.jit
def _softmax(scores, top, total, scale):
    """Online softmax over one more tile: weights, maximum, total weight, and what shrinks sums."""
    new_top = gl.maximum(top, gl.max(scores, 0))
    shrink = gl.exp2((top - new_top) * scale)
    weights = gl.exp2(gl.fma(scores, scale, -(new_top * scale)[None, :]))
    return weights, new_top, gl.fma(total, shrink, _total_of(weights)), shrink


@gluon.jit
def _both(all_acc, acc, old, new):
    """A split's weighted values joined to those of all before it."""
    return gl.fma(all_acc, old[None, :] + gl.zeros_like(acc), acc * new[None, :])


@gluon.jit
def _end_split(
    sums, stats, acc, top, total, all_acc, all_top, all_total, num_rows, part, most, scale, joins,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Join a split's result to all before it, or store it; what is joined then."""
    if joins:
        all_top, all_total, old, new = joined(all_top, all_total, top, total, scale)
        all_acc = _both(all_acc, acc, old, new)
    else:
        store_part(
            sums, stats, acc.permute((1, 0)), top, total, num_rows, part,
            HEADS, GROUP, HEAD_DIM, most,
        )  # fmt: skip
    return all_acc, all_top, all_total


@gluon.jit
def _share_first(
    q_memory, shared, tiles, full, free, use, kv, seen, uncut, uncut_end, lowest, scale,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Share the weights of the first KV tile; their maximum and total."""
    SLOTS: gl.constexpr = tiles.shape[0]
    TILE: gl.constexpr = tiles.shape[1]
    token = _multiply_keys(q_memory, tiles, full, use)
    scores = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(free.index(use % SLOTS), count=1)
    scores = _hidden(scores, kv, seen, uncut, uncut_end, TILE, WINDOW)
    weights, top, total, _ = _softmax(scores, lowest, gl.zeros_like(lowest), scale)
    _share(weights, shared)
    return top, total


@gluon.jit
def attend(
    q_memory, ring, full, free, count, begin, end, position, num_rows, scale,
    shared, sums, stats, part, most, joins, HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Queries over KV tiles ``begin .. end - 1``, from a split's border or a window's beginning.

    Arguments and results as of ``hopper_tiles.attend``, with ``shared``, [queries, TILE], for the
    weights of a tile; sums over splits stay in registers.
    """
    DTYPE: gl.constexpr = q_memory.dtype
    QUERIES: gl.constexpr = q_memory.shape[0]
    COLUMNS: gl.constexpr = products(QUERIES)
    tiles = ring._reinterpret(DTYPE, [SLOTS, TILE, BLOCK_DIM], swizzled(DTYPE))
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, COLUMNS)) // GROUP
    # As where queries are rows.
    lowest = gl.where(row < num_rows, LOWEST, -LOWEST)
    uncut, uncut_end = uncut_tiles(position, num_rows, TILE, WINDOW)

    top, total = _share_first(
        q_memory, shared, tiles, full, free, 2 * count, begin, position + row, uncut, uncut_end,
        lowest, scale, WINDOW,
    )  # fmt: skip
    acc = gl.zeros([BLOCK_DIM, QUERIES], gl.float32, COLUMNS)
    all_acc, all_top, all_total = acc, lowest, gl.zeros_like(lowest)
    split = split_of(begin * TILE)
    border = begin_of(split + 1) // TILE
    for kv in range(begin + 1, end):
        use = 2 * (count + kv - begin)
        scores_token = _multiply_keys(q_memory, tiles, full, use)
        acc_token = _add_values(shared, tiles, full, use - 1, acc)
        scores = warpgroup_mma_wait(1, deps=(scores_token,))
        mbarrier.arrive(free.index(use % SLOTS), count=1)
        scores = _hidden(scores, kv, position + row, uncut, uncut_end, TILE, WINDOW)
        split_top, split_total = top, total
        if kv == border:
            top, total = lowest, gl.zeros_like(lowest)
        weights, top, total, shrink = _softmax(scores, top, total, scale)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        mbarrier.arrive(free.index((use - 1) % SLOTS), count=1)
        if kv == border:
            all_acc, all_top, all_total = _end_split(
                sums, stats, acc, split_top, split_total, all_acc, all_top, all_total,
                num_rows, part + split, most, scale, joins, HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
            acc = gl.zeros([BLOCK_DIM, QUERIES], gl.float32, COLUMNS)
            split += 1
            border = begin_of(split + 1) // TILE
        else:
            acc = acc * shrink[None, :]
        _share(weights, shared)
    use = 2 * (count + end - begin) - 1
    acc = warpgroup_mma_wait(0, deps=(_add_values(shared, tiles, full, use, acc),))
    mbarrier.arrive(free.index(use % SLOTS), count=1)
    if joins:
        top, total, old, new = joined(all_top, all_total, top, total, scale)
        acc = _both(all_acc, acc, old, new)
    return acc.permute((1, 0)), top, total

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
    warpgroup_mma_wait,
)

from sametoken.ops.hopper_layouts import barrier, products, swizzled
from sametoken.ops.model.attention.hopper_sums import LOWEST, hidden, joined
from sametoken.ops.model.attention.hopper_tiles import (
    add_values,
    first_weights,
    last_values,
    multiply_keys,
    store_part,
    uncut_tiles,
    weigh,
)
from sametoken.ops.model.attention.schedule import begin_of, split_of


@gluon.jit
def _share(weights, shared):
    """Give a tile's weights to all warps; no product reads those before any more."""
    barrier()
    shared.permute((1, 0)).store(weights.to(shared.dtype))
    fence_async_shared()
    barrier()


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

    weights, top, total = first_weights(
        q_memory, tiles, full, free, 2 * count, begin, position + row, uncut, uncut_end,
        lowest, scale, WINDOW, True,
    )  # fmt: skip
    _share(weights, shared)
    acc = gl.zeros([BLOCK_DIM, QUERIES], gl.float32, COLUMNS)
    all_acc, all_top, all_total = acc, lowest, gl.zeros_like(lowest)
    split = split_of(begin * TILE)
    border = begin_of(split + 1) // TILE
    for kv in range(begin + 1, end):
        use = 2 * (count + kv - begin)
        scores_token = multiply_keys(q_memory, tiles, full, use, True)
        acc_token = add_values(shared, tiles, full, use - 1, acc, True)
        scores = warpgroup_mma_wait(1, deps=(scores_token,))
        mbarrier.arrive(free.index(use % SLOTS), count=1)
        scores = hidden(scores, kv, position + row, uncut, uncut_end, WINDOW, True)
        split_top, split_total = top, total
        if kv == border:
            top, total = lowest, gl.zeros_like(lowest)
        weights, top, total, shrink = weigh(scores, top, total, scale, True)
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
    acc = last_values(shared, tiles, full, free, 2 * (count + end - begin) - 1, acc, True)
    if joins:
        top, total, old, new = joined(all_top, all_total, top, total, scale)
        acc = _both(all_acc, acc, old, new)
    return acc.permute((1, 0)), top, total

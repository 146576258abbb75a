"""The arithmetic of attention that every launch form shares, so that bits agree.

Accumulators hold queries along one axis and elements of a head along the other. Which comes
first, KV_LEFT, says whether KV or the queries are the left operand of the matrix products: it
moves numbers between registers and changes none of them.

Which rows and heads a program of attention serves.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_range(position, SPLIT: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """First and last split that any of these rows sees; absent rows are at -1 and see none."""
    last = tl.max(position)
    first = tl.maximum(lowest_of(position) - SLIDING_WINDOW + 1, 0) if SLIDING_WINDOW else 0 * last
    last = tl.where(last < 0, -1, last // SPLIT)
    return (first // SPLIT).to(tl.int32), last.to(tl.int32)


@triton.jit
def lowest_of(position):
    """The lowest position of the queries that take part; -1 if none does."""
    return tl.min(tl.where(position < 0, tl.max(position), position))


@triton.jit
def next_turn(turn, position, acc):
    """The position whose queries are computed next, by themselves; above all at the end.

    A query gives weight 0 to positions that it cannot see but another one here can, and 0
    times a value that is not finite is NaN. So all queries are computed together in turn -1,
    and if that gave NaN, those of each position alone: then nothing that they cannot see is
    read.
    """
    spread_out = lowest_of(position) < tl.max(position)
    again = turn >= 0
    if spread_out & (turn < 0):
        again = tl.max(tl.max((acc != acc).to(tl.int32), 0), 0) != 0
    end = tl.max(position) + 1
    following = tl.min(tl.where(position > turn, position, end))
    return tl.where(again, following, end)


@triton.jit
def of_turn(turn, position):
    """Positions of the queries of this turn, -1 for the others."""
    return tl.where((turn < 0) | (position == turn), position, -1)


@triton.jit
def per_query(x, KV_LEFT: tl.constexpr):
    """[queries] in the shape that broadcasts over the accumulators' other axis."""
    return x[None, :] if KV_LEFT else x[:, None]


@triton.jit
def per_element(x, KV_LEFT: tl.constexpr):
    """[elements], or [positions] beside queries, in the shape that broadcasts over queries."""
    return x[:, None] if KV_LEFT else x[None, :]


@triton.jit
def empty_split(BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr, KV_LEFT: tl.constexpr):
    """Weighted values, total weights and highest scores before the first position."""
    acc = tl.zeros([BLOCK_DIM, QUERIES] if KV_LEFT else [QUERIES, BLOCK_DIM], tl.float32)
    totals = tl.zeros([16, QUERIES] if KV_LEFT else [QUERIES, 16], tl.float32)
    return acc, totals, tl.full([QUERIES], float("-inf"), tl.float32)


@triton.jit
def block_of(table, begin, stop, BLOCK_SIZE: tl.constexpr):
    """The block of a tile's first position; any if the tile does not exist.

    Asked for one tile ahead, it never stands between a tile's loads and the pipeline.
    """
    return tl.load(table + begin // BLOCK_SIZE, mask=begin < stop, other=0)


@triton.jit
def with_tile(
    state,  # of empty_split
    q,  # [BLOCK_DIM, queries] or [queries, BLOCK_DIM]
    position,  # [queries] int32, -1 for queries that take no part
    begin,  # the tile's first position
    stop,  # no query sees this position or one beyond
    block,  # of block_of
    table,  # [max_blocks] int64: the slot's blocks
    keys,
    values,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """Add one tile of positions to a split's weighted values, total weights and peaks.

    A tile that a row cannot see leaves its numbers as they are, to the bit, so the rows it is
    computed beside do not matter. Positions that no row here can see are not read at all.
    """
    acc, totals, peak = state
    KV_AXIS: tl.constexpr = 0 if KV_LEFT else 1
    dim = tl.arange(0, acc.shape[KV_AXIS])
    at = begin + tl.arange(0, TILE)
    seen = at < stop
    start, offset = _places(at, seen, begin, block, table, block_stride, HEAD_DIM, BLOCK_SIZE, TILE)
    if SLIDING_WINDOW:
        seen = seen & (at > lowest_of(position) - SLIDING_WINDOW)
    k_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys + start + (offset[:, None] + dim[None, :]), mask=k_mask, other=0)
    scores = tl.dot(k, q, input_precision="ieee") if KV_LEFT else _right(q, k)
    where, limit = per_element(at, KV_LEFT), per_query(position, KV_LEFT)
    visible = where <= limit
    if SLIDING_WINDOW:
        visible = visible & (where > limit - SLIDING_WINDOW)
    scores = tl.where(visible, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, KV_AXIS))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2((scores - per_query(base, KV_LEFT)) * scale).to(q.dtype)
    shrink = per_query(tl.exp2((peak - base) * scale), KV_LEFT)
    # Of the accumulators' shape: as a left operand V must come with its elements first.
    v_at = per_query(offset, KV_LEFT) + per_element(dim, KV_LEFT)
    v_mask = per_query(seen, KV_LEFT) & per_element(dim < HEAD_DIM, KV_LEFT)
    v = tl.load(values + start + v_at, mask=v_mask, other=0)
    acc, totals = _accumulated(acc * shrink, totals * shrink, weights, v, KV_LEFT)
    return acc, totals, new_peak


@triton.jit
def _places(
    at,
    seen,
    begin,
    block,
    table,
    block_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where a tile's positions lie in memory: a start for all, and from there on [TILE]."""
    if BLOCK_SIZE % TILE == 0:
        # One block holds the tile, so one scalar says where it is.
        start = block * block_stride + begin % BLOCK_SIZE * HEAD_DIM
        offset = tl.arange(0, TILE) * HEAD_DIM
    else:
        start = block * 0
        blocks = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0)
        offset = blocks * block_stride + at % BLOCK_SIZE * HEAD_DIM
    return start, offset


@triton.jit
def _right(q, k):
    return tl.dot(q, k.T, input_precision="ieee")


@triton.jit
def _accumulated(acc, totals, weights, v, KV_LEFT: tl.constexpr):
    """Add weighted values and weights.

    Weights are totalled by the matrix unit, in the order of the positions; tl.sum would add
    in an order that follows the query tile.
    """
    if KV_LEFT:
        ones = tl.full([16, v.shape[1]], 1.0, v.dtype)
        acc = tl.dot(v, weights, acc, input_precision="ieee")
        totals = tl.dot(ones, weights, totals, input_precision="ieee")
    else:
        ones = tl.full([v.shape[0], 16], 1.0, v.dtype)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
        totals = tl.dot(weights, ones, totals, input_precision="ieee")
    return acc, totals


@triton.jit
def total_of(totals, KV_LEFT: tl.constexpr):
    """Each query's total weight: the matrix unit gave it sixteen times."""
    return tl.max(totals, 0 if KV_LEFT else 1)


@triton.jit
def end_of(position, split, SPLIT: tl.constexpr):
    """The first position of a split that no query sees, or where the split ends."""
    return tl.minimum((split + 1) * SPLIT, tl.max(position) + 1).to(tl.int32)


@triton.jit
def merged(acc, total, peak, part, scale, KV_LEFT: tl.constexpr):
    """Add a split's partial result to that of the splits before it.

    The multiply-adds are explicit: left to the compiler, they could be contracted one way in
    one kernel and another way in the next.
    """
    acc_split, total_split, peak_split = part
    new_peak = tl.maximum(peak, peak_split)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old = tl.exp2((peak - base) * scale)
    new = tl.exp2((peak_split - base) * scale)
    total = tl.fma(total, old, total_split * new)
    acc = tl.fma(acc, per_query(old, KV_LEFT), acc_split * per_query(new, KV_LEFT))
    return acc, total, new_peak


@triton.jit
def normalised(acc, total, KV_LEFT: tl.constexpr):
    """Weighted values over total weight; queries that took no part have none and give 0."""
    return acc / per_query(tl.where(total == 0.0, 1.0, total), KV_LEFT)


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

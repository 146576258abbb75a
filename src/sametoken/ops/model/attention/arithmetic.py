"""Online softmax over KV tiles, and the query tile of a program, shared by both launch forms.

Accumulators hold queries along one axis and head elements along the other. KV_LEFT puts KV, not
the queries, on the left of the matrix products: it changes the register layout and no value.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.attention.kv_triton import as_read
from sametoken.ops.model.attention.tuning import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def split_range(position, SPLIT: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """First and last split that any of these rows sees; absent rows have position -1."""
    last = tl.max(position)
    first = tl.maximum(lowest_of(position) - SLIDING_WINDOW + 1, 0) if SLIDING_WINDOW else 0 * last
    last = tl.where(last < 0, -1, last // SPLIT)
    return (first // SPLIT).to(tl.int32), last.to(tl.int32)


@triton.jit
def lowest_of(position):
    """The lowest position of the active queries; -1 without any."""
    return tl.min(tl.where(position < 0, tl.max(position), position))


@triton.jit
def next_isolated(isolated, position, acc):
    """The next position whose queries are computed alone; above all positions at the end.

    A query gives weight 0 to positions that it cannot see but another query of the tile can, and
    0 times a non-finite value is NaN. So all queries are computed together first (``isolated`` is
    -1); if that gave NaN, the queries of each position are computed again alone, which reads no
    position that they cannot see.
    """
    spread_out = lowest_of(position) < tl.max(position)
    again = isolated >= 0
    if spread_out & (isolated < 0):
        again = tl.max(tl.max((acc != acc).to(tl.int32), 0), 0) != 0
    end = tl.max(position) + 1
    following = tl.min(tl.where(position > isolated, position, end))
    return tl.where(again, following, end)


@triton.jit
def isolate(isolated, position):
    """Positions of the queries that are computed now, -1 for the others."""
    return tl.where((isolated < 0) | (position == isolated), position, -1)


@triton.jit
def per_query(x, KV_LEFT: tl.constexpr):
    """[queries], shaped to broadcast over the accumulators' other axis."""
    return x[None, :] if KV_LEFT else x[:, None]


@triton.jit
def per_element(x, KV_LEFT: tl.constexpr):
    """[elements] or [positions], shaped to broadcast over queries."""
    return x[:, None] if KV_LEFT else x[None, :]


@triton.jit
def empty_split(BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr, KV_LEFT: tl.constexpr):
    """Initial weighted values, total weights and maximum scores."""
    acc = tl.zeros([BLOCK_DIM, QUERIES] if KV_LEFT else [QUERIES, BLOCK_DIM], tl.float32)
    totals = tl.zeros([16, QUERIES] if KV_LEFT else [QUERIES, 16], tl.float32)
    return acc, totals, tl.full([QUERIES], float("-inf"), tl.float32)


@triton.jit
def block_of(memory, begin, stop, BLOCK_SIZE: tl.constexpr):
    """The block of a tile's first position; block 0 if the tile does not exist.

    Loaded one tile ahead, so that a tile's KV loads never wait for it.
    """
    return tl.load(memory[0] + begin // BLOCK_SIZE, mask=begin < stop, other=0)


@triton.jit
def with_tile(
    state,  # of empty_split
    q,  # [BLOCK_DIM, queries] or [queries, BLOCK_DIM]
    position,  # [queries] int32, -1 for inactive queries
    begin,  # the tile's first position
    stop,  # one past the last position that any query sees
    block,  # of block_of
    memory,  # the slot's blocks [max_blocks] int64, keys and values, and the stride of their blocks
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    KV_LEFT: tl.constexpr,
):
    """Online softmax: add one tile of positions to a split's state.

    A tile that a row cannot see leaves the row's state unchanged to the bit, so the other rows of
    the program do not matter. Positions that no row here can see are not read.
    """
    acc, totals, peak = state
    table, keys, values, block_stride = memory
    dim = tl.arange(0, acc.shape[0 if KV_LEFT else 1])
    at = begin + tl.arange(0, TILE)
    seen = at < stop
    start, offset = places(at, seen, begin, block, table, block_stride, HEAD_DIM, BLOCK_SIZE, TILE)
    if SLIDING_WINDOW:
        seen = seen & (at > lowest_of(position) - SLIDING_WINDOW)
    k_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys + start + (offset[:, None] + dim[None, :]), mask=k_mask, other=0)
    k = as_read(k, q.dtype)
    scores = tl.dot(k, q, input_precision="ieee") if KV_LEFT else _right(q, k)
    where, limit = per_element(at, KV_LEFT), per_query(position, KV_LEFT)
    visible = where <= limit
    if SLIDING_WINDOW:
        visible = visible & (where > limit - SLIDING_WINDOW)
    scores = tl.where(visible, scores, float("-inf"))

    weights, shrink, peak = softmax(scores, peak, scale, q.dtype, KV_LEFT)
    # In the accumulators' shape: as a left operand, V needs its elements first.
    v_at = per_query(offset, KV_LEFT) + per_element(dim, KV_LEFT)
    v_mask = per_query(seen, KV_LEFT) & per_element(dim < HEAD_DIM, KV_LEFT)
    v = as_read(tl.load(values + start + v_at, mask=v_mask, other=0), q.dtype)
    acc, totals = accumulated(acc * shrink, totals * shrink, weights, v, KV_LEFT)
    return acc, totals, peak


@triton.jit
def places(
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
    """Memory offsets of a tile's positions: a common start, and [TILE] offsets from it."""
    if BLOCK_SIZE % TILE == 0:
        # One block holds the tile, so one scalar locates it.
        start = block * block_stride + begin % BLOCK_SIZE * HEAD_DIM
        offset = tl.arange(0, TILE) * HEAD_DIM
    else:
        start = block * 0
        blocks = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0)
        offset = blocks * block_stride + at % BLOCK_SIZE * HEAD_DIM
    return start, offset


@triton.jit
def softmax(scores, peak, scale, dtype: tl.constexpr, KV_LEFT: tl.constexpr):
    """A tile's weights in ``dtype``, what shrinks the state before it, and the maximum score."""
    new_peak = tl.maximum(peak, tl.max(scores, 0 if KV_LEFT else 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2((scores - per_query(base, KV_LEFT)) * scale).to(dtype)
    return weights, per_query(tl.exp2((peak - base) * scale), KV_LEFT), new_peak


@triton.jit
def _right(q, k):
    return tl.dot(q, k.T, input_precision="ieee")


@triton.jit
def accumulated(acc, totals, weights, v, KV_LEFT: tl.constexpr):
    """Add weighted values and weights.

    Tensor cores sum the weights in the order of the positions; the order of tl.sum would depend
    on the query tile.
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
    """Each query's total weight; the sixteen copies in ``totals`` are equal."""
    return tl.max(totals, 0 if KV_LEFT else 1)


@triton.jit
def end_of(position, split, SPLIT: tl.constexpr):
    """One past the last position of a split that any query sees."""
    return tl.minimum((split + 1) * SPLIT, tl.max(position) + 1).to(tl.int32)


@triton.jit
def merged(acc, total, peak, part, scale, KV_LEFT: tl.constexpr):
    """Merge a split's partial result into that of the splits before it.

    Multiply-adds are explicit, since the compiler could contract them differently in each kernel.
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
def with_sink(acc, total, peak, sink, scale, KV_LEFT: tl.constexpr):
    """Merge each query's sink into its splits: one more split, of weight 1, whose values are 0.

    Divided by the scale, which ``merged`` multiplies scores with.
    """
    part = (tl.zeros_like(acc), tl.zeros_like(total) + 1.0, sink * _LOG2_E / scale)
    acc, total, _peak = merged(acc, total, peak, part, scale, KV_LEFT)
    return acc, total


@triton.jit
def normalised(acc, total, KV_LEFT: tl.constexpr):
    """Weighted values over total weight; 0 for inactive queries, whose weight is 0."""
    return acc / per_query(tl.where(total == 0.0, 1.0, total), KV_LEFT)


@triton.jit
def scaled(x, scales, kv_head):
    """Times the scale of a KV head, if there are scales."""
    return x if scales is None else x * tl.load(scales + kv_head)


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

    Returns each query's position (int32, -1 for dead rows: those of another slot), its index in
    [num_rows * heads] relative to the tile's first one (int32), that first index (int64), and the
    elements' offsets in [heads, HEAD_DIM] from there with their mask, both in the shape of the
    accumulators.
    """
    query = tl.arange(0, BLOCK_QUERIES)
    row = first + query // GROUP
    present = (row < stop) & (query < BLOCK_QUERIES // GROUP * GROUP)
    row = tl.where(present, row, first)
    live = present
    if ragged is not None:
        live = present & (tl.load(slots + row) == slot)
    position = tl.where(live, tl.load(positions + row), -1).to(tl.int32)
    # An int64 scalar and int32 vectors: int64 vectors would fill the registers.
    heads = tl.num_programs(1) * GROUP
    first_index = first.to(tl.int64) * heads + tl.program_id(1) * GROUP
    index = (row - first) * heads + query % GROUP
    dim = per_element(tl.arange(0, BLOCK_DIM), KV_LEFT)
    at = per_query(index, KV_LEFT) * HEAD_DIM + dim
    mask = per_query(present, KV_LEFT) & (dim < HEAD_DIM)
    return position, index, first_index, at, mask

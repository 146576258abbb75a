"""A query tile's softmax and sums on Hopper, in Gluon: of a KV tile, and over splits.

Queries are the rows of scores, or the columns if KV is on the left of products. Between two splits,
sums lie in shared memory, or in memory where that has no room for large heads.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sametoken.ops.hopper_layouts import products
from sametoken.ops.model.attention.arithmetic import per_element, per_query
from sametoken.ops.model.attention.tuning import LOG2_E

#: Queries of a warp group.
QUERIES = gl.constexpr(64)
#: Largest heads whose sums over splits shared memory has room for, and the columns of a part in
#: which those of larger ones are kept.
SHARED_DIM = gl.constexpr(128)
PART = gl.constexpr(64)
#: The maximum score before any; finite, so that differences of two are numbers.
LOWEST = gl.constexpr(-1.0e30)
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.constexpr_function
def kept_shape(block_dim, warp_groups):
    """Of a warp group of ``rows_kernel``, the sums in shared memory: [parts, QUERIES, columns]."""
    if block_dim <= SHARED_DIM.value:
        return [1, QUERIES.value, block_dim]
    return [block_dim // PART.value if warp_groups == 1 else 1, QUERIES.value, PART.value]


@gluon.jit
def hidden(scores, tile, seen, uncut, uncut_end, WINDOW: gl.constexpr, KV_LEFT: gl.constexpr):
    """Scores of one KV tile, without those that a query does not see; most tiles are seen whole."""
    cut = tile >= uncut_end
    if uncut is not None:
        cut = cut | (tile < uncut)
    if cut:
        TILE: gl.constexpr = scores.shape[0 if KV_LEFT else 1]
        BY_PLACE: gl.constexpr = gl.SliceLayout(1 if KV_LEFT else 0, scores.type.layout)
        at = per_element(tile * TILE + gl.arange(0, TILE, layout=BY_PLACE), KV_LEFT)
        last = per_query(seen, KV_LEFT)
        visible = at <= last
        if WINDOW:
            visible = visible & (at > last - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def softmax(scores, top, scale, KV_LEFT: gl.constexpr):
    """Online softmax over one more tile: its weights, the maximum, and what shrinks sums."""
    new_top = gl.maximum(top, gl.max(scores, 0 if KV_LEFT else 1))
    shrink = gl.exp2((top - new_top) * scale)
    weights = gl.exp2(gl.fma(scores, scale, -per_query(new_top * scale, KV_LEFT)))
    return weights, new_top, shrink


@gluon.jit
def joined(top, total, split_top, split_total, scale):
    """The splits so far with one more: maximum, total, and the factors of both weighted sums."""
    new_top = gl.maximum(top, split_top)
    old = gl.exp2((top - new_top) * scale)
    new = gl.exp2((split_top - new_top) * scale)
    return new_top, gl.fma(total, old, split_total * new), old, new


@gluon.jit
def with_sinks(acc, top, total, sinks, scale):
    """Join each query's sink to all its splits: one more, of weight 1, whose values are 0.

    Its maximum is the logit over the scale that ``joined`` multiplies with. The compiler could
    contract a product with the difference there, in each kernel differently, but no multiply-add.
    """
    sink_top = gl.fma(sinks, _LOG2_E / scale, 0.0)
    _, total, old, _ = joined(top, total, sink_top, 1.0, scale)
    return acc * old[:, None], total


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns, in the registers where they are."""
    HALF: gl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape([QUERIES, 2, HALF]).permute((0, 2, 1)).split()
    return (
        gl.convert_layout(left, products(HALF), assert_trivial=True),
        gl.convert_layout(right, products(HALF), assert_trivial=True),
    )


@gluon.jit
def _whole(left, right):
    """What ``_halves`` divided."""
    COLUMNS: gl.constexpr = 2 * left.shape[1]
    acc = gl.join(left, right).permute((0, 2, 1)).reshape([QUERIES, COLUMNS])
    return gl.convert_layout(acc, products(COLUMNS), assert_trivial=True)


@gluon.jit
def _in_memory(rest, kept, part, PLACE: gl.constexpr):
    """Where a part lies that ``kept`` has no room for: what a warp reads at once lies together."""
    COLUMNS: gl.constexpr = part.shape[1]
    query = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, part.type.layout))[:, None]
    dim = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, part.type.layout))[None, :]
    rest += (PLACE - kept.shape[0]) * QUERIES * COLUMNS
    return rest + dim // 8 * (QUERIES * 8) + query * 8 + dim % 8


@gluon.jit
def keep(kept, rest, acc, PLACE: gl.constexpr = 0):
    """Keep weighted values for ``summed``, whose threads read what they have written.

    ``acc`` has the parts from ``PLACE`` on; ``kept`` has the first parts of all.
    """
    PARTS: gl.constexpr = acc.shape[1] // kept.shape[2]
    if PARTS > 1:
        left, right = _halves(acc)
        keep(kept, rest, left, PLACE)
        keep(kept, rest, right, PLACE + PARTS // 2)
    elif kept.shape[0] > PLACE:
        kept.index(PLACE).store(acc)
    else:
        gl.store(_in_memory(rest, kept, acc, PLACE), acc)


@gluon.jit
def summed(kept, rest, acc, old, new, some, PLACE: gl.constexpr = 0):
    """A split's weighted values joined to those of ``keep``, if there are some."""
    PARTS: gl.constexpr = acc.shape[1] // kept.shape[2]
    if PARTS > 1:
        left, right = _halves(acc)
        left = summed(kept, rest, left, old, new, some, PLACE)
        right = summed(kept, rest, right, old, new, some, PLACE + PARTS // 2)
        acc = _whole(left, right)
    else:
        BY_QUERY: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        if kept.shape[0] > PLACE:
            before = gl.zeros_like(acc)
            if some:
                before = kept.index(PLACE).load(acc.type.layout)
        else:
            # Loads without a branch are moved to their use.
            before = gl.load(_in_memory(rest, kept, acc, PLACE), mask=some, other=0.0)
        new = gl.convert_layout(new, BY_QUERY)[:, None]
        acc = gl.fma(before, gl.convert_layout(old, BY_QUERY)[:, None], acc * new)
    return acc

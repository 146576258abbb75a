"""Results of splits of 64 queries in memory, in Gluon: stored, or joined to those before.

A warp group's half [64, 256] moves in four chunks of 64 elements, each as lines: a thread stores
four elements of a query side by side, in the order of ``dim_of``.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sametoken.ops.model.latent_attention.hopper_tiles import RANK, divisor_of

#: Elements of a chunk.
CHUNK = gl.constexpr(64)
#: Registers of the lines of a chunk [64 queries, 64 elements].
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


@gluon.jit
def dim_of(place):
    """Which element of a latent lies at a place 0 .. 511 of a line."""
    return place // 16 * 16 + place // 4 % 4 * 2 + place // 2 % 2 * 8 + place % 2


@gluon.jit
def _halves(sums):
    """[64, columns] as its lower and its upper columns."""
    COLUMNS: gl.constexpr = sums.shape[1] // 2
    return gl.split(sums.reshape([sums.shape[0], 2, COLUMNS]).permute((0, 2, 1)))


@gluon.jit
def _lines_of(chunk):
    """A chunk of sums as lines, in the order of ``dim_of``."""
    lines = chunk.reshape([64, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(lines.reshape([64, CHUNK]), LINES)


@gluon.jit
def _places(BEGIN: gl.constexpr):
    """Queries [64, 1] of a chunk's lines, and places in 0 .. 511 [1, 64]."""
    query = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    place = BEGIN + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LINES))
    return query[:, None], place[None, :]


@gluon.jit
def _store_chunk(target, chunk, num_queries, stride, BEGIN: gl.constexpr):
    query, place = _places(BEGIN)
    gl.store(target + query * stride + place, _lines_of(chunk), mask=query < num_queries)


@gluon.jit
def store_half(target, sums, num_queries, stride, BEGIN: gl.constexpr):
    """Store one group's half of adjacent queries from place BEGIN of lines, ``stride`` apart."""
    low, high = _halves(sums)
    first, second = _halves(low)
    third, fourth = _halves(high)
    _store_chunk(target, first, num_queries, stride, BEGIN)
    _store_chunk(target, second, num_queries, stride, BEGIN + CHUNK)
    _store_chunk(target, third, num_queries, stride, BEGIN + 2 * CHUNK)
    _store_chunk(target, fourth, num_queries, stride, BEGIN + 3 * CHUNK)


@gluon.jit
def load_chunk(running, some, BEGIN: gl.constexpr):
    """A chunk's lines of the splits so far, or 0 before the first."""
    query, place = _places(BEGIN)
    return gl.load(running + query * RANK + place, mask=some & (query >= 0), other=0.0)


@gluon.jit
def _join_chunk(running, out, before, chunk, factors, num_queries, last, BEGIN: gl.constexpr):
    """Join a split's chunk to ``running``; after the last split, divide and store outputs."""
    BY_LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    old, new, total, vector_scale, live = factors
    lines = _lines_of(chunk)
    query, place = _places(BEGIN)
    old = gl.convert_layout(old, BY_LINE)[:, None] + gl.zeros_like(lines)
    result = gl.fma(before, old, lines * gl.convert_layout(new, BY_LINE)[:, None])
    if last:
        divisor = gl.convert_layout(divisor_of(total, vector_scale), BY_LINE)[:, None]
        shown = gl.convert_layout(live.to(gl.int32), BY_LINE)[:, None] > 0
        final = gl.where(shown, result / divisor, 0.0).to(out.dtype.element_ty)
        gl.store(out + query * RANK + dim_of(place), final, mask=query < num_queries)
    else:
        gl.store(running + query * RANK + place, result)


@gluon.jit
def join_half(running, out, ahead, sums, factors, num_queries, some, last, BEGIN: gl.constexpr):
    """Join a split's half to ``running``, or store outputs after the ``last``.

    Loads of two chunks are in flight ahead of the stores: ``ahead`` are those of the first two.

    Args:
        factors: of the splits so far and of this one, total weights, the scale of vectors, and
            whether a row is live.
    """
    first_before, second_before = ahead
    low, high = _halves(sums)
    first, second = _halves(low)
    third, fourth = _halves(high)
    _join_chunk(running, out, first_before, first, factors, num_queries, last, BEGIN)
    third_before = load_chunk(running, some, BEGIN + 2 * CHUNK)
    _join_chunk(running, out, second_before, second, factors, num_queries, last, BEGIN + CHUNK)
    fourth_before = load_chunk(running, some, BEGIN + 3 * CHUNK)
    _join_chunk(running, out, third_before, third, factors, num_queries, last, BEGIN + 2 * CHUNK)
    _join_chunk(running, out, fourth_before, fourth, factors, num_queries, last, BEGIN + 3 * CHUNK)

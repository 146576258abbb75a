"""Results of splits of 16 or 32 queries in memory, in Gluon: stored as parts, or as outputs.

A summing group's half of a latent, sums [256, queries], is stored as lines of one query each, in
which a thread's four elements of a query lie side by side.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sametoken.ops.model.latent_attention.hopper_tiles import HALF, RANK, divisor_of


@gluon.jit
def dim_of(place):
    """Which element of a latent lies at a place 0 .. 511 of a line.

    Four places side by side are one thread's: elements 8, 128 and 136 apart.
    """
    half, warp, row = place // HALF, place // 32 % 8, place // 4 % 8
    return half * HALF + place // 2 % 2 * 128 + warp * 16 + place % 2 * 8 + row


@gluon.constexpr_function
def _line_registers(queries):
    """Registers of lines [queries, 256], each element where ``products`` has it."""
    columns = [[bit, 0] for bit in (8, 16) if bit < queries]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], *columns, [0, 128]],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[queries, 256],
    )


@gluon.jit
def _lines_of(sums):
    """Sums [256, queries] as lines [queries, 256], in the order of ``dim_of``."""
    QUERIES: gl.constexpr = sums.shape[1]
    LINES: gl.constexpr = _line_registers(QUERIES)
    lines = sums.reshape([2, 8, 2, 8, QUERIES]).permute((4, 1, 3, 0, 2)).reshape([QUERIES, HALF])
    return gl.convert_layout(lines, LINES)


@gluon.jit
def store_sums(sums, half, num_columns, part, most):
    """Store a half of one split's weighted latents of adjacent queries, whose first line is
    ``part``, from ``sums`` on, where the half's places begin.

    Results stay in L2 until the next layer's replace them: vectors are read once, and would drive
    them out to memory.
    """
    lines = _lines_of(half)
    LINES: gl.constexpr = lines.type.layout
    query = gl.arange(0, lines.shape[0], layout=gl.SliceLayout(1, LINES))[:, None]
    at = query * (most * RANK) + gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))[None, :]
    at += part * RANK
    gl.store(sums + at, lines, mask=query < num_columns, eviction_policy="evict_last")


@gluon.jit
def store_stats(stats, total, top, num_columns, part, most):
    """Store total weights and maximum scores of one split, whose first line is ``part``."""
    query = gl.arange(0, top.shape[0], layout=top.type.layout)
    line = stats + part * 2 + query.to(gl.int64) * most * 2
    gl.store(line, total, mask=query < num_columns)
    gl.store(line + 1, top, mask=query < num_columns)


@gluon.jit
def store_outputs(
    out, half, total, vector_scale, slots, begin, first, num_columns, HEADS: gl.constexpr
):  # fmt: skip
    """Store a half of the outputs of adjacent queries from ``first`` of the run that begins at row
    ``begin``, from ``out`` on, where the half's elements begin; dead rows are 0.
    """
    QUERIES: gl.constexpr = half.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, half.type.layout))
    at_row = slots + begin + (first + column) // HEADS
    live = gl.load(at_row, mask=column < num_columns, other=-1) == gl.load(slots + begin)
    half = half / divisor_of(total, vector_scale)[None, :]
    half = gl.where(live[None, :], half, 0.0)
    lines = gl.convert_layout(half.to(out.dtype.element_ty).permute((1, 0)), LINES)
    query = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, LINES))[:, None]
    at = query * RANK + gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))[None, :]
    at_query = out + (begin.to(gl.int64) * HEADS + first) * RANK
    gl.store(at_query + at, lines, mask=query < num_columns)

"""Tiles of few-row products on Hopper, in Gluon: two warps load them, others multiply and store.

A tile is 64 rows of a weight, of a gated product 32 of gate and 32 of up. Its depth comes in chunks
of PARTS boxes of 128 bytes a row. Weights are written by no kernel before, so their warp does not
wait for any, and fills all slots while those still run. Activations come after the wait, and so
does all that is stored, which needs them.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import load_box


@gluon.jit
def load_weights(
    weight, boxes, full, free, num_tiles, chunks, row_tiles, out_features,
    GATED: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights: boxes of 32 rows, of a gated product of gate, then of up."""
    OWN: gl.constexpr = 32 if GATED else 64
    COLUMNS: gl.constexpr = boxes.shape[2]
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first = tile // row_tiles * OWN
        for chunk in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 64 * 128 * PARTS)
            for part in gl.static_range(PARTS):
                for half in gl.static_range(2):
                    row = first + half * (out_features if GATED else 32)
                    at = (chunk * PARTS + part) * COLUMNS
                    place = boxes.index((slot * PARTS + part) * 2 + half)
                    load_box(weight, [row, at], full.index(slot), place)
            n += 1


@gluon.jit
def load_rows(
    x, boxes, full, free, num_tiles, chunks, row_tiles,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that loads activations."""
    ROWS: gl.constexpr = boxes.shape[1]
    COLUMNS: gl.constexpr = boxes.shape[2]
    if PDL:
        cuda.gdc_wait()
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = tile % row_tiles * ROWS
        for chunk in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), ROWS * 128 * PARTS)
            for part in gl.static_range(PARTS):
                at = (chunk * PARTS + part) * COLUMNS
                load_box(x, [row, at], full.index(slot), boxes.index(slot * PARTS + part))
            n += 1


@gluon.jit
def silu_mul_of(gate, up, dtype: gl.constexpr):
    """SiLU of sums of the gate times those of up, as ``activated``."""
    gate = gate.to(dtype).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up.to(dtype).to(gl.float32)


@gluon.jit
def store_features(out, bias, sums, first_feature, first_row, rows, out_features):
    """Store sums [features, rows of a tile], rounded once after the bias."""
    LAYOUT: gl.constexpr = sums.type.layout
    feature = first_feature + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    inside = feature < out_features
    if bias is not None:
        sums += gl.load(bias + feature, mask=inside, other=0.0)[:, None]
    at = out + row.to(gl.int64)[None, :] * out_features + feature[:, None]
    gl.store(at, sums.to(out.dtype.element_ty), mask=(row < rows)[None, :] & inside[:, None])

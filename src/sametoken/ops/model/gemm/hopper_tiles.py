"""What products of few rows on Hopper share, in Gluon: loads of activations, stores of results.

A warp loads weights, which no kernel before writes: it waits for none, and fills all slots while
those still run. Another loads activations, after the wait; what is stored needs them. The depth of
a tile comes in chunks of PARTS boxes of 128 bytes a row.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import copy_to_shared, load_box
from sametoken.ops.model.gemm.triton import first_row_of

#: Threads of a warp that loads, each of which arrives when its copies are there.
LANES = gl.constexpr(32)
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [LANES.value], [1], [0]))


@gluon.jit
def load_rows(
    x, boxes, scales, scale_lines, groups, full, free, num_tiles, chunks, row_tiles, rows,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that loads activations, and the scales of their groups, if there are any."""
    ROWS: gl.constexpr = boxes.shape[1]
    COLUMNS: gl.constexpr = boxes.shape[2]
    if PDL:
        cuda.gdc_wait()
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = first_row_of(tile % row_tiles, rows, ROWS)
        line = gl.minimum(row + gl.arange(0, ROWS, layout=ONE_WARP), rows - 1)
        for chunk in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            if scale_lines is not None:
                for part in gl.static_range(PARTS):
                    copy_scales(
                        scales, line, chunk * PARTS + part, groups,
                        scale_lines.index(slot * PARTS + part),
                    )  # fmt: skip
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            mbarrier.expect(full.index(slot), ROWS * 128 * PARTS)
            for part in gl.static_range(PARTS):
                at = (chunk * PARTS + part) * COLUMNS
                load_box(x, [row, at], full.index(slot), boxes.index(slot * PARTS + part))
            n += 1


@gluon.jit
def copy_scales(scales, line, group, groups, into):
    """Begin to copy a group's scales of some lines; behind the last group any, for sums of 0."""
    copy_to_shared(into, scales + line * groups + gl.minimum(group, groups - 1))


@gluon.jit
def halves_of(sums):
    """A product's sums [64, rows] as gates and ups, or features 32 apart: [32, rows] each."""
    ROWS: gl.constexpr = sums.shape[1]
    return gl.split(sums.reshape([4, 2, 8, ROWS]).permute((0, 2, 3, 1)).reshape([32, ROWS, 2]))


@gluon.jit
def with_bias(sums, bias, first_feature, out_features):
    """Sums [features, rows] and the bias, if any."""
    if bias is not None:
        places = gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
        feature = first_feature + places
        sums += gl.load(bias + feature, mask=feature < out_features, other=0.0)[:, None]
    return sums


@gluon.jit
def store_features(out, values, first_feature, end_feature, first_row, rows, out_features):
    """Store values [features, rows of a tile], rounded, up to ``end_feature``."""
    LAYOUT: gl.constexpr = values.type.layout
    feature = first_feature + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = out + row.to(gl.int64)[None, :] * out_features + feature[:, None]
    mask = (row < rows)[None, :] & (feature < end_feature)[:, None]
    gl.store(at, values.to(out.dtype.element_ty), mask=mask)

"""Float8 products of few rows on Hopper, in Gluon: weights that arrive before activations do.

A program's slots take nearly all of a multiprocessor's shared memory, and its weights are on their
way while the kernels before it run, which leave the memory idle (docs/LOG.md).
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import new_barriers, products, swizzled
from sametoken.ops.model.gemm.hopper_tiles import (
    load_rows,
    load_weights,
    silu_mul_of,
    store_features,
)

#: Boxes of 128 elements in a chunk's row.
PARTS = gl.constexpr(2)
#: Gate and up [32 features, rows, 2] of a feature in one thread.
_GATE_AND_UP = gl.constexpr(gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1]))


@gluon.jit
def _rows_of_tile(first, out_features, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows of a tile, at most the last."""
    row = gl.arange(0, 64, layout=LAYOUT)
    if GATED:
        return gl.minimum(first + row % 32, out_features - 1) + row // 32 * out_features
    return gl.minimum(first + row, out_features - 1)


@gluon.jit
def _with_products(sums, weights, x, slot):
    """Sums and the products of a chunk, in order."""
    token = sums
    for part in gl.static_range(PARTS):
        left, right = weights.index(slot * PARTS + part), x.index(slot * PARTS + part)
        token = warpgroup_mma(left, right.permute((1, 0)), token, is_async=True)
    return warpgroup_mma_wait(0, deps=(token,))


@gluon.jit
def _multiply(
    scales, row_scales, bias, out, weights, x, full, free, num_tiles, chunks, rows, out_features,
    GATED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The warp group that multiplies and stores."""
    ROWS: gl.constexpr = x.shape[1]
    SUMS: gl.constexpr = products(ROWS, 32)
    OWN: gl.constexpr = 32 if GATED else 64
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first = tile * OWN
        w_row = _rows_of_tile(first, out_features, GATED, gl.SliceLayout(1, SUMS))
        scale = gl.load(scales + w_row)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
        sums = gl.zeros([64, ROWS], gl.float32, SUMS)
        for _ in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
            sums = _with_products(sums, weights, x, slot)
            mbarrier.arrive(free.index(slot))
            n += 1
        # The kernel before wrote these; it has ended, as activations are there.
        row_scale = gl.load(row_scales + row, mask=row < rows, other=0.0, cache_modifier=".cg")
        sums = sums * (scale[:, None] * row_scale[None, :])
        if GATED:
            both = sums.reshape([2, 32, ROWS]).permute((1, 2, 0))
            gate, up = gl.split(gl.convert_layout(both, _GATE_AND_UP))
            sums = silu_mul_of(gate, up, out.dtype.element_ty)
        store_features(out, bias, sums, first, 0, rows, out_features)


@gluon.jit(do_not_specialize=["rows", "num_tiles"])
def few_rows_kernel(
    x,  # descriptor of [rows, in_features] float8 e4m3
    weight,  # descriptor of [out_features or twice as many, in_features], likewise
    scales,  # [out_features or twice as many] fp32
    row_scales,  # [rows] fp32
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,  # at most ROWS
    num_tiles,
    chunks,
    out_features,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Products with 64 features a tile; tiles are shared out among the programs in turn."""
    if PDL:
        cuda.gdc_launch_dependents()
    LAYOUT: gl.constexpr = swizzled(x.dtype)
    boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * PARTS * 2, 32, 128], LAYOUT)
    x_boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * PARTS, ROWS, 128], LAYOUT)
    # A slot is full when both warps' loads are there.
    full, free = new_barriers(SLOTS, 2), new_barriers(SLOTS, 1)
    weights = boxes._reinterpret(x.dtype, [SLOTS * PARTS, 64, 128], LAYOUT)
    gl.warp_specialize(
        [
            (_multiply, (
                scales, row_scales, bias, out, weights, x_boxes, full, free, num_tiles, chunks,
                rows, out_features, GATED, SLOTS,
            )),
            (load_weights, (
                weight, boxes, full, free, num_tiles, chunks, 1, out_features, GATED, PARTS, SLOTS,
            )),
            (load_rows, (
                x, x_boxes, full, free, num_tiles, chunks, 1, PARTS, SLOTS, PDL,
            )),
        ],
        [1, 1], [24, 24],
    )  # fmt: skip

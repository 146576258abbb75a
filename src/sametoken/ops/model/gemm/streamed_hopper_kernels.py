"""Products of few rows on Hopper, in Gluon: weights that arrive before activations do.

A program's slots take nearly all of a multiprocessor's shared memory, and its weights are on their
way while the kernels before it run, which leave the memory idle (docs/LOG.md). Each warp group adds
up products of FEATURES features and all rows of a tile, in order; all have the same activations.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from sametoken.ops.hopper_layouts import load_box, new_barriers, products, swizzled
from sametoken.ops.model.activation_triton import activated
from sametoken.ops.model.gemm.hopper_tiles import (
    LANES,
    ONE_WARP,
    copy_scales,
    halves_of,
    load_rows,
    store_features,
    with_bias,
)
from sametoken.ops.model.gemm.triton import first_row_of


@gluon.jit
def _load_weights(
    weight, scales, groups, shared, sizes, GATED: gl.constexpr, FEATURES: gl.constexpr,
    HEIGHT: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights, and the scales of their groups, if there are any.

    8 rows of gate and 8 of up take turns in boxes.
    """
    boxes, scale_lines, _, _, full, free = shared
    _, row_tiles, num_tiles, chunks, out_features = sizes
    BOX: gl.constexpr = boxes.shape[1]
    COLUMNS: gl.constexpr = boxes.shape[2]
    ROWS: gl.constexpr = 64 if GATED else FEATURES
    TURNS: gl.constexpr = swizzled(boxes.dtype, 4)
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first = tile // row_tiles * (GROUPS * FEATURES)
        for chunk in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            if scale_lines is not None:
                for place in gl.static_range(PARTS * GROUPS):
                    row = first + place % GROUPS * FEATURES
                    copy_scales(
                        scales, _features_of(row, out_features, GATED, ONE_WARP),
                        chunk * PARTS + place // GROUPS, groups,
                        scale_lines.index(slot * PARTS * GROUPS + place),
                    )  # fmt: skip
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            mbarrier.expect(full.index(slot), PARTS * GROUPS * ROWS * 128)
            for part in gl.static_range(PARTS):
                at = (chunk * PARTS + part) * COLUMNS
                for group in gl.static_range(GROUPS):
                    place = ((slot * PARTS + part) * GROUPS + group) * (HEIGHT // BOX)
                    row = first + group * FEATURES
                    if GATED:
                        turns = boxes.index(place)._reinterpret(
                            boxes.dtype, [4, 2, 8, COLUMNS], TURNS
                        )
                        load_box(weight, [row // 8, 0, 0, at], full.index(slot), turns)
                    else:
                        for box in gl.static_range(ROWS // BOX):
                            begin = [row + box * BOX, at]
                            load_box(weight, begin, full.index(slot), boxes.index(place + box))
            n += 1


@gluon.jit
def _operands(
    boxes, x, slot, part, HEIGHT: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Weights and rows of a part of a chunk.

    The unit reads 64 rows from a box on. Those beyond the group's are other weights, or none, and
    their products are not stored.
    """
    LAYOUT: gl.constexpr = swizzled(x.dtype)
    BOX: gl.constexpr = boxes.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    place = (slot * PARTS + part) * GROUPS + GROUP
    if HEIGHT == 64:
        whole = boxes._reinterpret(x.dtype, [boxes.shape[0] * BOX // 64, 64, COLUMNS], LAYOUT)
        left = whole.index(place)
    else:
        box = boxes.index(place * (HEIGHT // BOX))
        left = box._reinterpret(x.dtype, [64, COLUMNS], LAYOUT)
    return left, x.index(slot * PARTS + part).permute((1, 0))


@gluon.jit
def _whole_sums(
    shared, n, chunks, SUMS: gl.constexpr, HEIGHT: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A tile's sums, which stay in the tensor cores, and the number of chunks until then."""
    boxes, _, x, _, full, free = shared
    ROWS: gl.constexpr = x.shape[1]
    sums = gl.zeros([64, ROWS], gl.float32, SUMS)
    for chunk in range(chunks):
        mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
        for part in gl.static_range(PARTS):
            left, right = _operands(boxes, x, n % SLOTS, part, HEIGHT, GROUP, GROUPS, PARTS)
            sums = warpgroup_mma(left, right, sums, is_async=True)
        # The products of the chunk before have ended.
        sums = warpgroup_mma_wait(PARTS, deps=(sums,))
        if chunk > 0:
            mbarrier.arrive(free.index((n - 1) % SLOTS))
        n += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(free.index((n - 1) % SLOTS))
    return sums, n


@gluon.jit
def _sums_of_groups(
    shared, n, chunks, SUMS: gl.constexpr, HEIGHT: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """As ``_whole_sums``, of parts of 128 elements that are added times their scales."""
    boxes, scale_lines, x, row_scale_lines, full, free = shared
    ROWS: gl.constexpr = x.shape[1]
    sums = gl.zeros([64, ROWS], gl.float32, SUMS)
    for _ in range(chunks):
        slot = n % SLOTS
        mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
        parts, factors = (), ()
        for part in gl.static_range(PARTS):
            left, right = _operands(boxes, x, slot, part, HEIGHT, GROUP, GROUPS, PARTS)
            zeros = gl.zeros([64, ROWS], gl.float32, SUMS)
            parts += (warpgroup_mma(left, right, zeros, use_acc=False, is_async=True),)
        for part in gl.static_range(PARTS):
            place = slot * PARTS + part
            scale = scale_lines.index(place * GROUPS + GROUP).load(gl.SliceLayout(1, SUMS))
            row_scale = row_scale_lines.index(place).load(gl.SliceLayout(0, SUMS))
            factors += (scale[:, None] * row_scale[None, :],)
        ended = warpgroup_mma_wait(0, deps=parts)
        parts = (ended,) if PARTS == 1 else ended
        for part in gl.static_range(PARTS):
            sums = gl.fma(parts[part], factors[part], sums)
        mbarrier.arrive(free.index(slot))
        n += 1
    return sums, n


@gluon.jit
def _features_of(first, out_features, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows that a group's product has; any beyond the last."""
    row = gl.arange(0, 64, layout=LAYOUT)
    if GATED:
        feature = gl.minimum(first + row // 16 * 8 + row % 8, out_features - 1)
        return feature + row // 8 % 2 * out_features
    return gl.minimum(first + row, out_features - 1)


@gluon.jit
def _multiply(
    given, shared, sizes, GATED: gl.constexpr, FEATURES: gl.constexpr, HEIGHT: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A warp group that multiplies and stores."""
    scales, row_scales, bias, out = given
    _, scale_lines, x, _, _, _ = shared
    rows, row_tiles, num_tiles, chunks, out_features = sizes
    ROWS: gl.constexpr = x.shape[1]
    SUMS: gl.constexpr = products(ROWS, 256 // x.dtype.primitive_bitwidth)
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first = (tile // row_tiles * GROUPS + GROUP) * FEATURES
        row = first_row_of(tile % row_tiles, rows, ROWS)
        if scale_lines is not None:
            sums, n = _sums_of_groups(shared, n, chunks, SUMS, HEIGHT, GROUP, GROUPS, PARTS, SLOTS)
        else:
            if scales is not None:
                feature = _features_of(first, out_features, GATED, gl.SliceLayout(1, SUMS))
                scale = gl.load(scales + feature)
            sums, n = _whole_sums(shared, n, chunks, SUMS, HEIGHT, GROUP, GROUPS, PARTS, SLOTS)
            if scales is not None:
                # The kernel before wrote those of rows; it has ended, as activations are there.
                at = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), rows - 1)
                row_scale = gl.load(row_scales + at, cache_modifier=".cg")
                sums = sums * (scale[:, None] * row_scale[None, :])
        if GATED:
            gate, up = halves_of(sums)
            sums = activated(gate, up, out.dtype.element_ty, "silu_mul")
        values = with_bias(sums, bias, first, out_features).to(out.dtype.element_ty)
        if ROWS > 8:
            # A thread's features are neighbours in memory.
            EACH: gl.constexpr = values.shape[0] // 8
            NEAR: gl.constexpr = gl.BlockedLayout([EACH, 1], [8, 4], [1, 4], [0, 1])
            values = gl.convert_layout(values, NEAR)
        end = gl.minimum(first + FEATURES, out_features)
        store_features(out, values, first, end, row, rows, out_features)


@gluon.jit(do_not_specialize=["rows", "row_tiles", "num_tiles", "chunks"])
def streamed_kernel(
    x,  # descriptor of [rows, in_features]
    weight,  # descriptor of [out_features, in_features]; gated: [features / 8, 2, 8, in_features]
    scales,  # of float8: [out_features or twice as many] fp32, or of groups of each, or None
    row_scales,  # likewise: [rows] fp32
    scale_groups,  # of 128 elements of a sum that have scales; None: sums have them whole
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    row_tiles,
    num_tiles,  # of features and rows
    chunks,
    out_features,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,  # of a tile
    FEATURES: gl.constexpr,  # of a warp group: a multiple of 16 up to 64, 32 if GATED
    HEIGHT: gl.constexpr,  # rows of shared memory for them: as many as are loaded, or 64
    BOX: gl.constexpr,  # rows of a weight in a box
    GROUPS: gl.constexpr,
    PARTS: gl.constexpr,  # boxes of 128 bytes in the depth of a chunk
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Products in tiles, which are shared out among the programs in turn."""
    if PDL:
        cuda.gdc_launch_dependents()
    LAYOUT: gl.constexpr = swizzled(x.dtype)
    COLUMNS: gl.constexpr = 1024 // x.dtype.primitive_bitwidth
    NUMBER: gl.constexpr = (SLOTS * PARTS * GROUPS * HEIGHT + 64 - HEIGHT) // BOX
    boxes = gl.allocate_shared_memory(x.dtype, [NUMBER, BOX, COLUMNS], LAYOUT)
    x_boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * PARTS, ROWS, COLUMNS], LAYOUT)
    scale_lines, row_scale_lines = None, None
    if scale_groups is not None:
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scale_lines = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS * GROUPS, 64], LINES)
        row_scale_lines = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS, ROWS], LINES)
    # A slot is full when both warps' loads are there, free when no group reads it.
    LOADS: gl.constexpr = 2 if scale_groups is None else 2 + 2 * LANES
    full, free = new_barriers(SLOTS, LOADS), new_barriers(SLOTS, GROUPS)
    given = scales, row_scales, bias, out
    shared = boxes, scale_lines, x_boxes, row_scale_lines, full, free
    sizes = (rows, row_tiles, num_tiles, chunks, out_features)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 0, GROUPS, PARTS, SLOTS,
                )),
                (_load_weights, (
                    weight, scales, scale_groups, shared, sizes,
                    GATED, FEATURES, HEIGHT, GROUPS, PARTS, SLOTS,
                )),
                (load_rows, (
                    x, x_boxes, row_scales, row_scale_lines, scale_groups,
                    full, free, num_tiles, chunks, row_tiles, rows, PARTS, SLOTS, PDL,
                )),
            ],
            [1, 1], [24, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 0, GROUPS, PARTS, SLOTS,
                )),
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 1, GROUPS, PARTS, SLOTS,
                )),
                (_load_weights, (
                    weight, scales, scale_groups, shared, sizes,
                    GATED, FEATURES, HEIGHT, GROUPS, PARTS, SLOTS,
                )),
                (load_rows, (
                    x, x_boxes, row_scales, row_scale_lines, scale_groups,
                    full, free, num_tiles, chunks, row_tiles, rows, PARTS, SLOTS, PDL,
                )),
            ],
            [4, 1, 1], [152, 24, 24],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 0, GROUPS, PARTS, SLOTS,
                )),
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 1, GROUPS, PARTS, SLOTS,
                )),
                (_multiply, (
                    given, shared, sizes, GATED, FEATURES, HEIGHT, 2, GROUPS, PARTS, SLOTS,
                )),
                (_load_weights, (
                    weight, scales, scale_groups, shared, sizes,
                    GATED, FEATURES, HEIGHT, GROUPS, PARTS, SLOTS,
                )),
                (load_rows, (
                    x, x_boxes, row_scales, row_scale_lines, scale_groups,
                    full, free, num_tiles, chunks, row_tiles, rows, PARTS, SLOTS, PDL,
                )),
            ],
            [4, 4, 1, 1], [120, 120, 24, 24],
        )  # fmt: skip

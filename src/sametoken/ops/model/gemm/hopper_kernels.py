"""Gate, up and SiLU of many rows on Hopper, in Gluon: one persistent kernel.

A warp loads tiles of rows and of both weights by TMA while two warp groups multiply them, each 64
rows by all features of the tile. Gate and up of a feature end in one thread, which applies SiLU
before anything is stored. Products add over in_features in order, as in ``triton``.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

#: Rows of a warp group and of a tile, and bytes of a row that a stage of the pipeline holds.
GROUP_ROWS = gl.constexpr(64)
TILE_ROWS = gl.constexpr(128)
STAGE_BYTES = gl.constexpr(128)
#: Tiles of neighbouring rows that are computed with the same features before the next features.
ROW_TILES = gl.constexpr(16)

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def _products(columns, bytes_each):
    """Registers of a warp group's products of this width."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32 // bytes_each]
    )


@gluon.jit
def _tile_at(place, row_tiles, num_tiles):
    """The tile of rows and the tile of features that come at a place of the order of tiles."""
    in_strip = ROW_TILES * (num_tiles // row_tiles)
    first = place // in_strip * ROW_TILES
    height = gl.minimum(ROW_TILES, row_tiles - first)
    return first + place % in_strip % height, place % in_strip // height


@gluon.jit
def _load_tiles(
    x, matrix, x_boxes, w_boxes, full, free, row_tiles, num_tiles, features, depth,
    FEATURES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: gate's and up's features and both groups' rows, stage by stage."""
    BYTES: gl.constexpr = x.dtype.primitive_bitwidth // 8
    DEPTH: gl.constexpr = STAGE_BYTES // BYTES
    count = 0
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, feature_tile = _tile_at(place, row_tiles, num_tiles)
        first_row, first_feature = row_tile * TILE_ROWS, feature_tile * FEATURES
        for at in range(0, depth, DEPTH):
            stage = count % STAGES
            filled = full.index(stage)
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, (TILE_ROWS + 2 * FEATURES) * STAGE_BYTES)
            load_box(matrix, [first_feature, at], filled, w_boxes.index(2 * stage))
            load_box(matrix, [features + first_feature, at], filled, w_boxes.index(2 * stage + 1))
            # Weights are loaded while the kernel before still runs.
            if PDL and count == 0:
                cuda.gdc_wait()
            load_box(x, [first_row, at], filled, x_boxes.index(2 * stage))
            load_box(x, [first_row + GROUP_ROWS, at], filled, x_boxes.index(2 * stage + 1))
            count += 1


@gluon.jit
def _multiply_tiles(
    out, feature_scales, row_scales, x_boxes, w_tiles, staged, full, free,
    row_tiles, num_tiles, num_rows, features, depth,
    GROUP: gl.constexpr, FEATURES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of each tile."""
    BYTES: gl.constexpr = x_boxes.dtype.primitive_bitwidth // 8
    PRODUCTS: gl.constexpr = _products(2 * FEATURES, BYTES)
    count = 0
    if PDL:
        cuda.gdc_wait()
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, feature_tile = _tile_at(place, row_tiles, num_tiles)
        first_row, first_feature = (
            row_tile * TILE_ROWS + GROUP * GROUP_ROWS,
            feature_tile * FEATURES,
        )
        sums = gl.zeros([GROUP_ROWS, 2 * FEATURES], gl.float32, PRODUCTS)
        for at in range(0, depth, STAGE_BYTES // BYTES):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            rows, weights = x_boxes.index(2 * stage + GROUP), w_tiles.index(stage).permute((1, 0))
            sums = warpgroup_mma(rows, weights, sums, use_acc=at > 0, is_async=True)
            # The products of the stage before have ended.
            sums = warpgroup_mma_wait(1, deps=(sums,))
            before = (count + STAGES - 1) % STAGES
            mbarrier.arrive(free.index(before), count=1, pred=at > 0)
            count += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
        gated = _gated(
            sums, out.dtype, feature_scales, row_scales, first_row, num_rows, first_feature,
            features,
        )  # fmt: skip
        _store_tile(out, staged.index(GROUP), gated, first_row, first_feature)
    tma.store_wait(0)


@gluon.jit
def _gated(
    sums, dtype: gl.constexpr, feature_scales, row_scales, first_row, num_rows, first_feature,
    features,
):  # fmt: skip
    """Sums [rows, gate and up] as silu(gate) * up, in the order of operations of ``triton``."""
    FEATURES: gl.constexpr = sums.shape[1] // 2
    gate, up = sums.reshape([GROUP_ROWS, 2, FEATURES]).permute((0, 2, 1)).split()
    if feature_scales is not None:
        ACROSS: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
        feature = first_feature + gl.arange(0, FEATURES, layout=ACROSS)
        inside = feature < features
        gate_scale = gl.load(feature_scales + feature, mask=inside, other=0.0)[None, :]
        up_scale = gl.load(feature_scales + features + feature, mask=inside, other=0.0)[None, :]
        if row_scales is not None:
            DOWN: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
            row = first_row + gl.arange(0, GROUP_ROWS, layout=DOWN)
            row_scale = gl.load(row_scales + row, mask=row < num_rows, other=0.0)[:, None]
            gate_scale, up_scale = gate_scale * row_scale, up_scale * row_scale
        gate, up = gate * gate_scale, up * up_scale
    gate = gate.to(dtype).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up.to(dtype).to(gl.float32)


@gluon.jit
def _store_tile(out, staged, values, first_row, first_feature):
    """Store a group's rows through shared memory; what is outside of ``out`` is left out."""
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(values.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    store_box(out, [first_row, first_feature], staged)


@gluon.jit(do_not_specialize=["row_tiles", "num_tiles", "num_rows"])
def gated_kernel(
    x,  # descriptor of [num_rows, depth]
    matrix,  # descriptor of [2 * features, depth]
    out,  # descriptor of [num_rows, features], written
    feature_scales,  # [2 * features] fp32, of a float8 matrix, or None
    row_scales,  # [num_rows] fp32, of float8 rows, or None
    row_tiles,
    num_tiles,
    num_rows,
    features,
    depth,
    FEATURES: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """``silu(gate) * up`` by tiles of TILE_ROWS rows and FEATURES features.

    Program ids: the first tile, which others follow at the distance of the number of programs.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    DEPTH: gl.constexpr = STAGE_BYTES // (x.dtype.primitive_bitwidth // 8)
    x_boxes = gl.allocate_shared_memory(x.dtype, [2 * STAGES, GROUP_ROWS, DEPTH], x.layout)
    w_boxes = gl.allocate_shared_memory(x.dtype, [2 * STAGES, FEATURES, DEPTH], matrix.layout)
    # A stage's gate and up lie side by side: one operand.
    w_tiles = w_boxes._reinterpret(x.dtype, [STAGES, 2 * FEATURES, DEPTH], matrix.layout)
    staged = gl.allocate_shared_memory(out.dtype, [2, GROUP_ROWS, FEATURES], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                out, feature_scales, row_scales, x_boxes, w_tiles, staged, full, free,
                row_tiles, num_tiles, num_rows, features, depth, 0, FEATURES, STAGES, PDL,
            )),
            (_multiply_tiles, (
                out, feature_scales, row_scales, x_boxes, w_tiles, staged, full, free,
                row_tiles, num_tiles, num_rows, features, depth, 1, FEATURES, STAGES, PDL,
            )),
            (_load_tiles, (
                x, matrix, x_boxes, w_boxes, full, free, row_tiles, num_tiles, features, depth,
                FEATURES, STAGES, PDL,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

"""Products of many float8 rows and a weight with scales of blocks on Hopper, in Gluon.

A warp loads tiles of rows and features by TMA, 128 elements of the sum at a time, while two warp
groups multiply them, each 64 rows. Products of 128 elements leave the tensor cores and are added
times their scales, as in ``triton``; meanwhile the other group multiplies.
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

from sametoken.ops.hopper_layouts import load_box, new_barriers, products, swizzled
from sametoken.ops.model.activation_triton import activated
from sametoken.ops.model.gemm.triton import first_row_of

#: Rows of a warp group, and rows and features of a block: features that share scales, elements of
#: the sum that do, and bytes of a line.
GROUP_ROWS = gl.constexpr(64)
BLOCK = gl.constexpr(128)
#: Registers of results as they are stored: a thread has neighbours of a row.
NEAR = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
#: Tiles of rows whose features are computed together, so that both stay in L2.
ROW_TILES = gl.constexpr(16)


@gluon.jit
def _count_tiles(sizes, tiles):
    """Tiles of all rows and features; those of experts follow their rows."""
    _, _, num_tiles, _, out_features = sizes
    if tiles[0] is not None:
        num_tiles = gl.load(tiles[0]) * ((out_features + BLOCK - 1) // BLOCK)
    return num_tiles


@gluon.jit
def _tile_at(place, sizes, tiles, GATED: gl.constexpr):
    """Of the tile at a place of their order its first row, the row after the last that is
    stored, its first feature, and that in the weight.
    """
    rows, row_tiles, num_tiles, _, out_features = sizes
    _, experts, firsts, ends, _ = tiles
    if experts is not None:
        feature_tiles = (out_features + BLOCK - 1) // BLOCK
        tile = place // feature_tiles
        row, end = gl.load(firsts + tile), gl.load(ends + tile)
        feature = place % feature_tiles * BLOCK
        own = gl.load(experts + tile) * (out_features * (2 if GATED else 1)) + feature
    else:
        in_strip = ROW_TILES * (num_tiles // row_tiles)
        first = place // in_strip * ROW_TILES
        height = gl.minimum(ROW_TILES, row_tiles - first)
        row, end = first_row_of(first + place % in_strip % height, rows, 2 * GROUP_ROWS), rows
        feature = place % in_strip // height * BLOCK
        own = feature
    return row, end, feature, own


@gluon.jit
def _load(
    x, weight, shared, sizes, tiles, GATED: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp. It waits for the kernel before once weights are on their way.

    Which experts' they are, kernels before have to say.
    """
    x_boxes, w_boxes, full, free = shared
    _, _, _, groups, out_features = sizes
    BLOCKS: gl.constexpr = 2 if GATED else 1
    if PDL and tiles[0] is not None:
        cuda.gdc_wait()
    n = 0 * groups
    for place in range(gl.program_id(0), _count_tiles(sizes, tiles), gl.num_programs(0)):
        row, _, _, own = _tile_at(place, sizes, tiles, GATED)
        for group in range(groups):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BLOCKS + 1) * BLOCK * BLOCK)
            at = group * BLOCK
            for block in gl.static_range(BLOCKS):
                begin = [own + block * out_features, at]
                load_box(weight, begin, full.index(slot), w_boxes.index(slot * BLOCKS + block))
            if PDL and n == 0:
                cuda.gdc_wait()
            load_box(x, [row, at], full.index(slot), x_boxes.index(slot * 2))
            load_box(x, [row + GROUP_ROWS, at], full.index(slot), x_boxes.index(slot * 2 + 1))
            n += 1


@gluon.jit
def _with_block(sums, x, w, factor):
    """Sums [rows, features] and the products of a block times a factor of each row."""
    SUMS: gl.constexpr = products(BLOCK, 32)
    part = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, SUMS)
    part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    return gl.fma(part, factor[:, None] + gl.zeros_like(part), sums)


@gluon.jit
def _lines_at(tiles, row, end):
    """The lines of the result in which a warp group's rows are stored; None: their own."""
    lines = None
    if tiles[4] is not None:
        place = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, NEAR))
        lines = gl.load(tiles[4] + place, mask=place < end, other=0)
    return lines


@gluon.jit
def _store(given, values, lines, row, end, feature, out_features):
    """Store [rows, features] of a warp group, with the bias, if any."""
    _, _, bias, out = given
    if bias is not None:
        column = feature + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, values.type.layout))
        values += gl.load(bias + column, mask=column < out_features, other=0.0)[None, :]
    values = gl.convert_layout(values.to(out.dtype.element_ty), NEAR)
    place = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, NEAR))
    if lines is None:
        lines = place
    column = feature + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, NEAR))
    mask = (place < end)[:, None] & (column < out_features)[None, :]
    at = out + lines.to(gl.int64)[:, None] * out_features + column[None, :]
    gl.store(at, values, mask=mask)


@gluon.jit
def _scales_at(given, sizes, row, own, group, GROUP: gl.constexpr, GATED: gl.constexpr):
    """Scales of a block's 64 rows, of its features, and of those of up."""
    w_scales, x_scales, _, _ = given
    rows, _, _, groups, out_features = sizes
    line = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, products(BLOCK, 32)))
    x_scale = gl.load(x_scales + gl.minimum(line + GROUP * GROUP_ROWS, rows - 1) * groups + group)
    w_scale = gl.load(w_scales + own * groups + group)
    up_scale = w_scale
    if GATED:
        up_scale = gl.load(w_scales + (own + out_features) * groups + group)
    return x_scale, w_scale, up_scale


@gluon.jit
def _sums(
    given, shared, sizes, n, tile, following, ahead, GROUP: gl.constexpr, GATED: gl.constexpr,
    SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Sums of a warp group's rows, and those of up, the loads so far, and the scales ahead."""
    x_boxes, w_boxes, full, free = shared
    _, _, _, groups, _ = sizes
    BLOCKS: gl.constexpr = 2 if GATED else 1
    row, own = tile
    next_row, next_own = following
    sums = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, products(BLOCK, 32))
    up = sums
    for group in range(groups):
        if AHEAD:
            x_scale, w_scale, up_scale = ahead
            last = group + 1 == groups
            ahead = _scales_at(
                given, sizes, gl.where(last, next_row, row), gl.where(last, next_own, own),
                gl.where(last, 0, group + 1), GROUP, GATED,
            )  # fmt: skip
        else:
            x_scale, w_scale, up_scale = _scales_at(given, sizes, row, own, group, GROUP, GATED)
        slot = n % SLOTS
        mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
        x = x_boxes.index(slot * 2 + GROUP)
        sums = _with_block(sums, x, w_boxes.index(slot * BLOCKS), w_scale * x_scale)
        if GATED:
            up = _with_block(up, x, w_boxes.index(slot * BLOCKS + 1), up_scale * x_scale)
        mbarrier.arrive(free.index(slot))
        n += 1
    return sums, up, n, ahead


@gluon.jit
def _pass(shared, n, groups, SLOTS: gl.constexpr):
    """Leave a tile's loads to the other warp group: the loads so far."""
    _, _, full, free = shared
    for _ in range(groups):
        slot = n % SLOTS
        mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
        mbarrier.arrive(free.index(slot))
        n += 1
    return n


@gluon.jit
def _multiply(
    given, shared, sizes, tiles, GROUP: gl.constexpr, GATED: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of each tile, if there are any.

    Sums of experts are short: what the next tile is, and the scales of the next block, are loaded
    one ahead, as a tile would wait for them as long as for its products.
    """
    _, _, _, groups, out_features = sizes
    AHEAD: gl.constexpr = tiles[1] is not None
    if PDL:
        cuda.gdc_wait()
    n = 0 * groups
    num_tiles = _count_tiles(sizes, tiles)
    first = gl.minimum(gl.program_id(0), num_tiles - 1)
    next_row, next_end, next_feature, next_own = _tile_at(first, sizes, tiles, GATED)
    ahead = (0, 0, 0)
    if AHEAD:
        ahead = _scales_at(given, sizes, next_row, next_own, 0, GROUP, GATED)
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, end, feature, own = next_row, next_end, next_feature, next_own
        following = gl.minimum(place + gl.num_programs(0), num_tiles - 1)
        next_row, next_end, next_feature, next_own = _tile_at(following, sizes, tiles, GATED)
        own_row = row + GROUP * GROUP_ROWS
        # Rows that are not experts' fill every tile.
        has_rows = own_row < end if AHEAD else True
        if has_rows:
            lines = _lines_at(tiles, own_row, end)
            sums, up, n, ahead = _sums(
                given, shared, sizes, n, (row, own), (next_row, next_own), ahead,
                GROUP, GATED, SLOTS, AHEAD,
            )  # fmt: skip
            if GATED:
                sums = activated(sums, up, given[3].dtype.element_ty, "silu_mul")
            _store(given, sums, lines, own_row, end, feature, out_features)
        else:
            n = _pass(shared, n, groups, SLOTS)
            if AHEAD:
                ahead = _scales_at(given, sizes, next_row, next_own, 0, GROUP, GATED)


@gluon.jit(do_not_specialize=["rows", "row_tiles", "num_tiles"])
def blocks_kernel(
    x,  # descriptor of [rows, in_features] float8
    weight,  # descriptor of [out_features, in_features] float8, twice as many if GATED
    w_scales,  # [weight's rows, groups] fp32, alike for the rows of a block
    x_scales,  # [rows, groups] fp32
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    row_tiles,
    num_tiles,  # of all rows and features, if they are not of experts
    groups,
    out_features,
    num_expert_tiles,  # [1], tiles of experts' rows, or None, as are the next four
    experts,  # [tiles], whose rows they have
    firsts,  # [tiles], their first rows
    ends,  # [tiles], the rows after their last
    order,  # [rows], where in ``out`` a row's products go; None: as they come
    GATED: gl.constexpr,  # gate and up of a tile's features are computed, then SiLU
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Products in tiles of 128 x 128, which are shared out among the programs in turn."""
    if PDL:
        cuda.gdc_launch_dependents()
    LAYOUT: gl.constexpr = swizzled(x.dtype)
    x_boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * 2, GROUP_ROWS, BLOCK], LAYOUT)
    w_boxes = gl.allocate_shared_memory(
        x.dtype, [SLOTS * (2 if GATED else 1), BLOCK, BLOCK], LAYOUT
    )
    full, free = new_barriers(SLOTS, 1), new_barriers(SLOTS, 2)
    given, shared = (w_scales, x_scales, bias, out), (x_boxes, w_boxes, full, free)
    sizes = (rows, row_tiles, num_tiles, groups, out_features)
    tiles = (num_expert_tiles, experts, firsts, ends, order)
    gl.warp_specialize(
        [
            (_multiply, (given, shared, sizes, tiles, 0, GATED, SLOTS, PDL)),
            (_multiply, (given, shared, sizes, tiles, 1, GATED, SLOTS, PDL)),
            (_load, (x, weight, shared, sizes, tiles, GATED, SLOTS, PDL)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

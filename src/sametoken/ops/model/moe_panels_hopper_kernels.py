"""Products of experts' many rows with 4-bit weights on Hopper, in Gluon.

A warp loads 128 rows and words of 256 features of an expert by TMA, a block of the sum at a time.
Two warp groups make the elements of half of the features each, in registers, and multiply them by
the rows: while one makes elements, the other's products run. Sums run on in the tensor cores in
one order, as in ``gemm.int4_panels``.
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
from sametoken.ops.model.gemm.int4_elements_hopper import (
    elements,
    factored_halves,
    lines_of,
    loaded,
    rows_of_product,
)

#: Rows of a tile, elements of a block of the sum and words of those, features of a product, and
#: rows of the weight in a tile.
ROWS = gl.constexpr(128)
BLOCK = gl.constexpr(128)
WORDS = gl.constexpr(16)
FEATURES = gl.constexpr(64)
TILE = gl.constexpr(256)
#: Rows of the weight that one load brings: of a gated product they have gates, or ups.
BOX = gl.constexpr(32)
#: Registers of results as they are stored: a thread has neighbours of a row.
NEAR = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
#: Of a product's rows.
PLACES = gl.constexpr(gl.SliceLayout(1, products(ROWS.value)))


@gluon.jit
def _count_tiles(tiles, out_features, GATED: gl.constexpr):
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE
    return gl.load(tiles[0]) * ((out_features + WIDTH - 1) // WIDTH)


@gluon.jit
def _tile_at(place, tiles, out_features, GATED: gl.constexpr):
    """A tile's first row, the row after its expert's last, its first feature, its expert."""
    _, experts, firsts, ends, _ = tiles
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE
    feature_tiles = (out_features + WIDTH - 1) // WIDTH
    tile = place // feature_tiles
    row, end, expert = gl.load(firsts + tile), gl.load(ends + tile), gl.load(experts + tile)
    return row, end, place % feature_tiles * WIDTH, expert


@gluon.jit
def _load(
    x, words, shared, sizes, tiles, GATED: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    x_boxes, word_boxes, full, free = shared
    blocks, out_features, _, stride = sizes
    if PDL:
        cuda.gdc_wait()
    n = 0 * blocks
    for place in range(
        gl.program_id(0), _count_tiles(tiles, out_features, GATED), gl.num_programs(0)
    ):
        row, _, feature, expert = _tile_at(place, tiles, out_features, GATED)
        own = expert * stride + feature
        for block in range(blocks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), ROWS * BLOCK * 2 + TILE * WORDS * 4)
            for box in gl.static_range(TILE // BOX):
                # Behind a box of gates lies that of their ups.
                apart = box // 2 * BOX + box % 2 * out_features if GATED else box * BOX
                into = word_boxes.index(slot * (TILE // BOX) + box)
                load_box(words, [own + apart, block * WORDS], full.index(slot), into)
            for half in gl.static_range(2):
                at = [row, block * BLOCK + half * (BLOCK // 2)]
                load_box(x, at, full.index(slot), x_boxes.index(slot * 2 + half))
            n += 1


@gluon.jit
def _scales_at(tile, sizes, PRODUCT: gl.constexpr, GATED: gl.constexpr):
    """Where the first scale of each row of a product lies."""
    _, out_features, groups, stride = sizes
    _, _, feature, expert = tile
    first = feature + PRODUCT * (FEATURES // 2 if GATED else FEATURES)
    return expert * groups * stride + rows_of_product(first, out_features, GATED, PLACES)


@gluon.jit
def _load_scales(given, at, stride, LINES: gl.constexpr):
    """Scales and offsets [64] of a block's groups, of e2m1 four in a word."""
    scales, offsets, _, _, _ = given
    found = ()
    for line in gl.static_range(LINES):
        scale = gl.load(scales + at + line * stride)
        if offsets is None:
            found += ((scale, scale),)
        else:
            found += ((scale, gl.load(offsets + at + line * stride)),)
    return found


@gluon.jit
def _made(
    words, scales, HAS_OFFSETS: gl.constexpr, IN_BLOCK: gl.constexpr, FORM: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Elements [64, 128] of words in shared memory."""
    in_order = words.load(loaded(1)).reshape([2, 4, 8, WORDS]).permute((1, 0, 2, 3))
    in_order = in_order.reshape([FEATURES, WORDS])
    return elements(in_order, scales, 0, HAS_OFFSETS, FORM, IN_BLOCK, ROWS, dtype)


@gluon.jit
def _halves(sums, factors, biases, first, expert, sizes, GATED: gl.constexpr):
    """Sums of gates and of ups, or of features 32 apart, [32, ROWS] each, and their biases."""
    _, out_features, _, stride = sizes
    own = None if factors is None else factors + expert * stride
    low, high = factored_halves(sums, own, first, out_features, GATED)
    if biases is not None:
        places = gl.arange(0, FEATURES // 2, layout=gl.SliceLayout(1, low.type.layout))
        feature, apart = first + places, out_features if GATED else FEATURES // 2
        own = biases + expert * stride + feature
        is_other = feature + (0 if GATED else FEATURES // 2) < out_features
        low += gl.load(own, mask=feature < out_features, other=0.0).to(gl.float32)[:, None]
        high += gl.load(own + apart, mask=is_other, other=0.0).to(gl.float32)[:, None]
    return low, high


@gluon.jit
def _store(out, low, high, order, tile, feature, out_features):
    """Store features 0 .. 31 and 32 .. 63 of all rows, in the order of pairs, if there is one."""
    row, end, _, _ = tile
    values = gl.join(low, high).permute((1, 2, 0)).reshape([ROWS, FEATURES])
    values = gl.convert_layout(values.to(out.dtype.element_ty), NEAR)
    line = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, NEAR))
    column = feature + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, NEAR))
    mask = (line < end)[:, None] & (column < out_features)[None, :]
    if order is not None:
        line = gl.load(order + line, mask=line < end, other=0)
    at = out + line.to(gl.int64)[:, None] * out_features + column[None, :]
    gl.store(at, values, mask=mask)


@gluon.jit
def _finish(
    given, first, second, order, tile, sizes, GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Add biases, activate and store the sums of both products of a warp group."""
    _, _, factors, biases, out = given
    _, out_features, _, _ = sizes
    _, _, feature, expert = tile
    dtype: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = FEATURES // 2 if GATED else FEATURES
    own = feature + GROUP * (2 * WIDTH)
    gate, up = _halves(first, factors, biases, own, expert, sizes, GATED)
    other_gate, other_up = _halves(second, factors, biases, own + WIDTH, expert, sizes, GATED)
    if GATED:
        low = activated(gate, up, dtype, ACTIVATION, ALPHA, LIMIT)
        high = activated(other_gate, other_up, dtype, ACTIVATION, ALPHA, LIMIT)
        _store(out, low, high, order, tile, own, out_features)
    else:
        _store(out, gate, up, order, tile, own, out_features)
        _store(out, other_gate, other_up, order, tile, own + WIDTH, out_features)


@gluon.jit
def _multiply(
    given, shared, sizes, tiles, GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, IN_BLOCK: gl.constexpr, FORM: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group: half of the features of each tile, by two products.

    What the next tile is, and the scales of the next block, are loaded one ahead.
    """
    x, words, full, free = shared
    blocks, out_features, _, stride = sizes
    GATED: gl.constexpr = ACTIVATION != "none"
    OFFSETS: gl.constexpr = given[1] is not None
    LINES: gl.constexpr = lines_of(FORM, IN_BLOCK)
    FIRST: gl.constexpr = 2 * GROUP
    if PDL:
        cuda.gdc_wait()
    n = 0 * blocks
    num_tiles = _count_tiles(tiles, out_features, GATED)
    next_tile = _tile_at(gl.minimum(gl.program_id(0), num_tiles - 1), tiles, out_features, GATED)
    next_at = _scales_at(next_tile, sizes, FIRST, GATED)
    next_other = _scales_at(next_tile, sizes, FIRST + 1, GATED)
    scales = _load_scales(given, next_at, stride, LINES)
    others = _load_scales(given, next_other, stride, LINES)
    for place in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile, at, other_at = next_tile, next_at, next_other
        following = gl.minimum(place + gl.num_programs(0), num_tiles - 1)
        next_tile = _tile_at(following, tiles, out_features, GATED)
        next_at = _scales_at(next_tile, sizes, FIRST, GATED)
        next_other = _scales_at(next_tile, sizes, FIRST + 1, GATED)
        first = gl.zeros([FEATURES, ROWS], gl.float32, products(ROWS))
        second = first
        for block in range(blocks):
            slot = n % SLOTS
            mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
            rows, half = x.index(slot).permute((1, 0)), 4 * slot + FIRST
            made = _made(words.index(half), scales, OFFSETS, IN_BLOCK, FORM, x.dtype)
            first = warpgroup_mma(made, rows, first, is_async=True)
            other = _made(words.index(half + 1), others, OFFSETS, IN_BLOCK, FORM, x.dtype)
            second = warpgroup_mma(other, rows, second, is_async=True)
            is_last = block + 1 == blocks
            ahead = (block + 1) * LINES * stride
            scales = _load_scales(given, gl.where(is_last, next_at, at + ahead), stride, LINES)
            others = _load_scales(
                given, gl.where(is_last, next_other, other_at + ahead), stride, LINES
            )
            # Products read the elements while they run.
            first, second, made, other = warpgroup_mma_wait(0, deps=(first, second, made, other))
            mbarrier.arrive(free.index(slot))
            n += 1
        _finish(given, first, second, tiles[4], tile, sizes, GROUP, ACTIVATION, ALPHA, LIMIT, GATED)


@gluon.jit
def panels_kernel(
    x,  # descriptor of [rows, in_features], by expert
    words,  # descriptor of [E * N, num_words], of gated products twice as many: ``Int4Panels``
    scales,  # [E, groups, N], ``Int4Panels.kernel_scales``
    offsets,  # likewise, or None
    factors,  # [E, N], or None
    biases,  # [E, N], or None
    out,  # [rows, out_features], written
    blocks,  # of a row of the weight
    out_features,
    groups,  # lines of an expert's scales
    num_tiles,  # [1], tiles of rows
    experts,  # [tiles], whose rows they have
    firsts,  # [tiles], their first rows
    ends,  # [tiles], the rows after their last
    order,  # [rows], where in ``out`` a row's products go; None: as they come
    ACTIVATION: gl.constexpr,  # of gate and up, as for ``activated``; "none": there is no gate
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    IN_BLOCK: gl.constexpr,  # groups of a block
    FORM: gl.constexpr,  # as for ``elements``
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Products in tiles of 128 rows, which are shared out among the programs in turn."""
    if PDL:
        cuda.gdc_launch_dependents()
    GATED: gl.constexpr = ACTIVATION != "none"
    X: gl.constexpr = swizzled(x.dtype)
    W: gl.constexpr = swizzled(gl.int32, line_bytes=64)
    x_boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * 2, ROWS, BLOCK // 2], X)
    word_boxes = gl.allocate_shared_memory(gl.int32, [SLOTS * (TILE // BOX), BOX, WORDS], W)
    full, free = new_barriers(SLOTS, 1), new_barriers(SLOTS, 2)
    given = (scales, offsets, factors, biases, out)
    shared = (
        x_boxes._reinterpret(x.dtype, [SLOTS, ROWS, BLOCK], X),
        word_boxes._reinterpret(gl.int32, [SLOTS * (TILE // FEATURES), FEATURES, WORDS], W),
        full, free,
    )  # fmt: skip
    sizes = (blocks, out_features, groups, out_features * (2 if GATED else 1))
    tiles = (num_tiles, experts, firsts, ends, order)
    gl.warp_specialize(
        [
            (_multiply, (
                given, shared, sizes, tiles, 0, ACTIVATION, ALPHA, LIMIT, IN_BLOCK, FORM, SLOTS, PDL
            )),
            (_multiply, (
                given, shared, sizes, tiles, 1, ACTIVATION, ALPHA, LIMIT, IN_BLOCK, FORM, SLOTS, PDL
            )),
            (_load, (x, words, (x_boxes, word_boxes, full, free), sizes, tiles, GATED, SLOTS, PDL)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip

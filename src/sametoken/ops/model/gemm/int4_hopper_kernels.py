"""Products of few rows with 4-bit weights on Hopper, in Gluon: warp groups in turns.

A program computes tiles of 64 features. Two warps load chunks of 256 input features, and three
groups of four warps take these in turns: a group makes the elements of its chunk in registers while
products of the others run, takes over the sums through shared memory, adds its products and hands
the sums on. So a row's products are added in order, and three groups make elements.

A group looks for its next chunk after its turn, when all chunks before the turn were read. There
are as many slots as groups at least, so none that it waits for is a round behind. A tile has as
many chunks: a group whose next chunk is in another tile takes the scales of the tile that follows.
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
from sametoken.ops.model.gemm.hopper_tiles import load_rows, store_features, with_bias
from sametoken.ops.model.gemm.int4_elements_hopper import (
    elements,
    factored_halves,
    lines_of,
    loaded,
    rows_of_product,
)
from sametoken.ops.model.gemm.triton import first_row_of

#: Warp groups that take turns.
GROUPS = gl.constexpr(3)
#: Words of 8 features in a chunk's row: two blocks of ``Int4Panels``.
WORDS = gl.constexpr(32)
_LOADED = gl.constexpr(loaded(2))


@gluon.constexpr_function
def _kept(rows):
    """Sums as they are handed on: [rows / 8, 128 threads, 4], 16 bytes of a thread together."""
    eights = [[1 << bit, 0, 0] for bit in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *eights],
        [[0, 1 << bit, 0] for bit in range(5)],
        [[0, 32, 0], [0, 64, 0]],
        [],
        [rows // 8, 128, 4],
    )


@gluon.jit
def _rows_of_tile(tile, row_tiles, out_features, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's row of each row of a tile's product, at most the last."""
    first = tile // row_tiles * (32 if GATED else 64)
    return rows_of_product(first, out_features, GATED, LAYOUT)


@gluon.jit
def _load_scales(given, rows, chunk, blocks, num_rows, LINES: gl.constexpr):
    """Scales and offsets [64] of each line of a chunk; past the last block, words are 0."""
    scales, offsets, _, _, _ = given
    found = ()
    for line in gl.static_range(2 * LINES):
        at = min(2 * chunk * LINES + line, blocks * LINES - 1) * num_rows + rows
        scale = gl.load(scales + at)
        if offsets is None:
            found += ((scale, scale),)
        else:
            found += ((scale, gl.load(offsets + at)),)
    return found


@gluon.jit
def _in_order(loaded):
    """Words [64, 32] as rows of the product: those of two blocks, [64, 16] each."""
    blocks = loaded.reshape([2, 4, 8, 2, 16]).permute((1, 0, 2, 4, 3)).reshape([64, 16, 2])
    return gl.split(blocks)


@gluon.jit
def _taken_over(memory, chunk, ROWS: gl.constexpr):
    """The sums of the chunks before; none before the first."""
    parts = memory.load(_kept(ROWS)).reshape([ROWS // 8, 4, 8, 4, 2, 2])
    sums = parts.permute((1, 4, 2, 0, 3, 5)).reshape([64, ROWS])
    return gl.where(chunk == 0, 0.0, gl.convert_layout(sums, products(ROWS), assert_trivial=True))


@gluon.jit
def _with_products(sums, first, second, x, place):
    """Sums and the products of two blocks, from ``place`` on, in order."""
    token = warpgroup_mma(first, x.index(place).permute((1, 0)), sums, is_async=True)
    token = warpgroup_mma(second, x.index(place + 1).permute((1, 0)), token, is_async=True)
    return warpgroup_mma_wait(0, deps=(token, first, second))[0]


@gluon.jit
def _hand_on(memory, sums, ROWS: gl.constexpr):
    parts = sums.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    memory.store(parts.reshape([ROWS // 8, 128, 4]))


@gluon.jit
def _store_half(out, bias, sums, first, row, rows, out_features):
    sums = with_bias(sums, bias, first, out_features)
    store_features(out, sums, first, out_features, row, rows, out_features)


@gluon.jit
def _store(
    given, sums, tile, row_tiles, rows, out_features, GATED: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """Store a tile's sums [64, ROWS]; GATED: SiLU of the gate times up."""
    _, _, factors, bias, out = given
    row = first_row_of(tile % row_tiles, rows, sums.shape[1])
    first = tile // row_tiles * (32 if GATED else 64)
    low, high = factored_halves(sums, factors, first, out_features, GATED)
    if GATED:
        gated = activated(low, high, dtype, "silu_mul")
        _store_half(out, bias, gated, first, row, rows, out_features)
    else:
        _store_half(out, bias, low, first, row, rows, out_features)
        _store_half(out, bias, high, first + 32, row, rows, out_features)


@gluon.jit
def _take_turns(
    given, memory, num_tiles, chunks, blocks, rows, row_tiles, out_features,
    GATED: gl.constexpr, FORM: gl.constexpr, IN_BLOCK: gl.constexpr, SLOTS: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """Warp group ME: every third chunk of the program's tiles."""
    words, x, shared, full, free, turns = memory
    ROWS: gl.constexpr = x.shape[1]
    dtype: gl.constexpr = x.dtype
    PLACES: gl.constexpr = gl.SliceLayout(1, products(ROWS))
    OFFSETS: gl.constexpr = given[1] is not None
    LINES: gl.constexpr = lines_of(FORM, IN_BLOCK)
    NEXT: gl.constexpr = (ME + 1) % GROUPS
    num_rows = out_features * (2 if GATED else 1)
    tile, chunk, n, turn = gl.program_id(0), ME + 0 * chunks, ME + 0 * chunks, 0 * chunks
    own_rows = _rows_of_tile(tile, row_tiles, out_features, GATED, PLACES)
    ahead = _load_scales(given, own_rows, chunk, blocks, num_rows, LINES)
    while tile < num_tiles:
        next_tile = tile + gl.num_programs(0)
        next_rows = _rows_of_tile(next_tile, row_tiles, out_features, GATED, PLACES)
        while chunk < chunks:
            slot = n % SLOTS
            mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
            one, two = _in_order(words.index(slot).load(_LOADED))
            first = elements(one, ahead, 0, OFFSETS, FORM, IN_BLOCK, ROWS, dtype)
            second = elements(two, ahead, LINES, OFFSETS, FORM, IN_BLOCK, ROWS, dtype)
            # The scales of the next turn arrive during this one.
            chunk_then = chunk + GROUPS
            ends = chunk_then >= chunks
            ahead = _load_scales(
                given, gl.where(ends, next_rows, own_rows),
                gl.where(ends, chunk_then - chunks, chunk_then), blocks, num_rows, LINES,
            )  # fmt: skip
            mbarrier.wait(turns.index(ME), (turn & 1) ^ (1 if ME == 0 else 0))
            sums = _taken_over(shared, chunk, ROWS)
            is_last = chunk == chunks - 1
            if is_last:
                # The next tile's sums need none of these.
                mbarrier.arrive(turns.index(NEXT))
            sums = _with_products(sums, first, second, x, 2 * slot)
            if is_last:
                mbarrier.arrive(free.index(slot))
                _store(given, sums, tile, row_tiles, rows, out_features, GATED, dtype)
            else:
                _hand_on(shared, sums, ROWS)
                mbarrier.arrive(turns.index(NEXT))
                mbarrier.arrive(free.index(slot))
            chunk, n, turn = chunk_then, n + GROUPS, turn + 1
        chunk -= chunks
        tile, own_rows = next_tile, next_rows


@gluon.jit
def _load_words(
    words, boxes, full, free, num_tiles, chunks, row_tiles, out_features, GATED: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads words: boxes of 32 rows, of a gated product of gate, then of up."""
    OWN: gl.constexpr = 32 if GATED else 64
    n = 0 * chunks
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first = tile // row_tiles * OWN
        for chunk in range(chunks):
            slot = n % SLOTS
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 64 * 128)
            for half in gl.static_range(2):
                row = first + half * (out_features if GATED else 32)
                place = boxes.index(slot * 2 + half)
                load_box(words, [row, chunk * WORDS], full.index(slot), place)
            n += 1


@gluon.jit(do_not_specialize=["rows", "num_tiles"])
def turns_kernel(
    x,  # descriptor of [rows, in_features]
    words,  # descriptor of [out_features or twice as many, num_words]: ``Int4Panels``
    scales,  # [lines, likewise], ``Int4Panels.kernel_scales``
    offsets,  # as scales, or None
    factors,  # [likewise], or None
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    row_tiles,
    num_tiles,  # of features and rows
    chunks,  # at least GROUPS
    blocks,
    out_features,
    GATED: gl.constexpr,
    FORM: gl.constexpr,  # ``Int4Panels.made_by``
    IN_BLOCK: gl.constexpr,  # groups of a block
    ROWS: gl.constexpr,  # of a tile
    SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Products with 64 features a tile; tiles are shared out among the programs in turn."""
    if PDL:
        cuda.gdc_launch_dependents()
    gl.static_assert(SLOTS >= GROUPS)
    W: gl.constexpr = swizzled(gl.int32)
    X: gl.constexpr = swizzled(x.dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    word_boxes = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, 32, WORDS], W)
    x_boxes = gl.allocate_shared_memory(x.dtype, [SLOTS * 4, ROWS, 64], X)
    shared = gl.allocate_shared_memory(gl.float32, [ROWS // 8, 128, 4], FLAT)
    # A slot is full when both warps' loads are there.
    full, free, turns = new_barriers(SLOTS, 2), new_barriers(SLOTS, 1), new_barriers(GROUPS, 1)
    memory = (
        word_boxes._reinterpret(gl.int32, [SLOTS, 64, WORDS], W),
        x_boxes._reinterpret(x.dtype, [SLOTS * 2, ROWS, 128], X),
        shared, full, free, turns,
    )  # fmt: skip
    given = (scales, offsets, factors, bias, out)
    gl.warp_specialize(
        [
            (_take_turns, (
                given, memory, num_tiles, chunks, blocks, rows, row_tiles, out_features,
                GATED, FORM, IN_BLOCK, SLOTS, 0,
            )),
            (_take_turns, (
                given, memory, num_tiles, chunks, blocks, rows, row_tiles, out_features,
                GATED, FORM, IN_BLOCK, SLOTS, 1,
            )),
            (_take_turns, (
                given, memory, num_tiles, chunks, blocks, rows, row_tiles, out_features,
                GATED, FORM, IN_BLOCK, SLOTS, 2,
            )),
            (_load_words, (
                words, word_boxes, full, free, num_tiles, chunks, row_tiles, out_features, GATED,
                SLOTS,
            )),
            (load_rows, (
                x, x_boxes, None, None, None,
                full, free, num_tiles, chunks, row_tiles, rows, 4, SLOTS, PDL,
            )),
        ],
        [4, 4, 1, 1], [160, 160, 24, 24],
    )  # fmt: skip

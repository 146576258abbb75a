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
from sametoken.ops.model.gemm.int4_elements_triton import on_base, ones
from sametoken.ops.model.gemm.triton import first_row_of

#: Warp groups that take turns.
GROUPS = gl.constexpr(3)
#: Words of 8 features in a chunk's row: two blocks of ``Int4Panels``.
WORDS = gl.constexpr(32)
#: Registers of a chunk's words [64, 32]. Row 32 h + 8 w + q is row 16 w + 8 h + q of the product
#: (``_in_order``), so a thread has sums of gate and up, and four neighbouring words of a block.
_LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [64, 32],
    )
)


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


@gluon.constexpr_function
def _pair_code(pair, dtype):
    """PTX of a pair's elements: as ``int4_elements_triton`` makes them of ``int4.pair_words``."""
    fma = f"fma.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}"
    return f"""{{
        .reg .b32 pair, ones, zeros;
        mov.b32 ones, 0x{ones(dtype):08X};
        mov.b32 zeros, 0x80008000;
        shr.b32 pair, $1, {4 * pair};
        lop3.b32 pair, pair, 0x000F000F, 0x{on_base(0, dtype):08X}, 0xEA;
        {fma} pair, pair, ones, $3;
        {fma} $0, pair, $2, zeros;
    }}"""


@gluon.jit
def _rows_of_tile(tile, row_tiles, out_features, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's row of each row of a tile's product, at most the last."""
    row = gl.arange(0, 64, layout=LAYOUT)
    low, half = row // 16 * 8 + row % 8, row // 8 % 2
    if GATED:
        return gl.minimum(tile // row_tiles * 32 + low, out_features - 1) + half * out_features
    return gl.minimum(tile // row_tiles * 64 + half * 32 + low, out_features - 1)


@gluon.jit
def _load_scales(scales, offsets, rows, block, blocks, num_rows, IN_BLOCK: gl.constexpr):
    """Scales and offsets [64] of each group of two blocks; past the last, words are 0."""
    found = ()
    for group in gl.static_range(2 * IN_BLOCK):
        at = min(block * IN_BLOCK + group, blocks * IN_BLOCK - 1) * num_rows + rows
        scale = gl.load(scales + at)
        if offsets is None:
            found += ((scale, scale),)
        else:
            found += ((scale, gl.load(offsets + at)),)
    return found


@gluon.jit
def _by_word(pairs, begin: gl.constexpr, which: gl.constexpr, words, IN_BLOCK: gl.constexpr):
    """Values [64] of a block's groups for the words [64, 4, groups, 4 / groups] of each."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, words.type.layout))
    if IN_BLOCK == 1:
        ROW: gl.constexpr = gl.SliceLayout(1, COLUMNS)
        one = gl.convert_layout(pairs[begin][which], ROW, assert_trivial=True)
        values = gl.expand_dims(one, 1)
    else:
        values = gl.join(pairs[begin][which], pairs[begin + IN_BLOCK // 2][which])
        if IN_BLOCK == 4:
            others = gl.join(pairs[begin + 1][which], pairs[begin + 3][which])
            values = gl.join(values, others).reshape([64, 4])
        values = gl.convert_layout(values, COLUMNS, assert_trivial=True)
    return gl.broadcast(gl.expand_dims(gl.expand_dims(values, 1), 3), words)[0]


@gluon.jit
def _in_order(loaded):
    """Words [64, 32] as rows of the product: those of two blocks, [64, 16] each."""
    blocks = loaded.reshape([2, 4, 8, 2, 16]).permute((1, 0, 2, 4, 3)).reshape([64, 16, 2])
    return gl.split(blocks)


@gluon.jit
def _pair(words, scale, offset, PAIR: gl.constexpr, dtype: gl.constexpr):
    """``(code - zero) * scale`` of both values of a pair, each rounded once."""
    CODE: gl.constexpr = _pair_code(PAIR, dtype)
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r", [words, scale, offset], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _elements(
    words, scales, begin: gl.constexpr, HAS_OFFSETS: gl.constexpr, IN_BLOCK: gl.constexpr,
    ROWS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A block's elements [64, 128], of words [64, 16], in the order of the product's operand."""
    words = words.reshape([64, 4, IN_BLOCK, 4 // IN_BLOCK])
    scale = _by_word(scales, begin, 0, words, IN_BLOCK)
    if HAS_OFFSETS:
        offset = _by_word(scales, begin, 1, words, IN_BLOCK)
    else:
        HALF: gl.constexpr = (on_base(8, dtype) | 0x8000_8000) - (1 << 32)
        offset = gl.full_like(scale, HALF)
    low = gl.join(_pair(words, scale, offset, 0, dtype), _pair(words, scale, offset, 1, dtype))
    high = gl.join(_pair(words, scale, offset, 2, dtype), _pair(words, scale, offset, 3, dtype))
    pairs = gl.join(low, high)
    halves = gl.join(pairs.to(gl.uint16), (pairs >> 16).to(gl.uint16)).to(dtype, bitcast=True)
    # From row, t, e, h, c, l, as ``int4.packed_words`` names them.
    ordered = halves.reshape([64, 4, 4, 2, 2, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, products(ROWS), 2)
    return gl.convert_layout(ordered, OPERAND, assert_trivial=True)


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
    out, bias, sums, tile, row_tiles, rows, out_features, GATED: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """Store a tile's sums [64, ROWS]; GATED: SiLU of the gate times up."""
    ROWS: gl.constexpr = sums.shape[1]
    row = first_row_of(tile % row_tiles, rows, ROWS)
    halves = sums.reshape([4, 2, 8, ROWS]).permute((0, 2, 3, 1)).reshape([32, ROWS, 2])
    low, high = gl.split(halves)
    if GATED:
        gated = activated(low, high, dtype, "silu_mul")
        first = tile // row_tiles * 32
        _store_half(out, bias, gated, first, row, rows, out_features)
    else:
        first = tile // row_tiles * 64
        _store_half(out, bias, low, first, row, rows, out_features)
        _store_half(out, bias, high, first + 32, row, rows, out_features)


@gluon.jit
def _take_turns(
    scales, offsets, bias, out, memory, num_tiles, chunks, blocks, rows, row_tiles, out_features,
    GATED: gl.constexpr, IN_BLOCK: gl.constexpr, SLOTS: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """Warp group ME: every third chunk of the program's tiles."""
    words, x, shared, full, free, turns = memory
    ROWS: gl.constexpr = x.shape[1]
    dtype: gl.constexpr = x.dtype
    PLACES: gl.constexpr = gl.SliceLayout(1, products(ROWS))
    HAS_OFFSETS: gl.constexpr = offsets is not None
    NEXT: gl.constexpr = (ME + 1) % GROUPS
    num_rows = out_features * (2 if GATED else 1)
    tile, chunk, n, turn = gl.program_id(0), ME + 0 * chunks, ME + 0 * chunks, 0 * chunks
    own_rows = _rows_of_tile(tile, row_tiles, out_features, GATED, PLACES)
    ahead = _load_scales(scales, offsets, own_rows, 2 * chunk, blocks, num_rows, IN_BLOCK)
    while tile < num_tiles:
        next_tile = tile + gl.num_programs(0)
        next_rows = _rows_of_tile(next_tile, row_tiles, out_features, GATED, PLACES)
        while chunk < chunks:
            slot = n % SLOTS
            mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
            one, two = _in_order(words.index(slot).load(_LOADED))
            first = _elements(one, ahead, 0, HAS_OFFSETS, IN_BLOCK, ROWS, dtype)
            second = _elements(two, ahead, IN_BLOCK, HAS_OFFSETS, IN_BLOCK, ROWS, dtype)
            # The scales of the next turn arrive during this one.
            chunk_then = chunk + GROUPS
            ends = chunk_then >= chunks
            rows_then = gl.where(ends, next_rows, own_rows)
            ahead = _load_scales(
                scales, offsets, rows_then, 2 * gl.where(ends, chunk_then - chunks, chunk_then),
                blocks, num_rows, IN_BLOCK,
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
                _store(out, bias, sums, tile, row_tiles, rows, out_features, GATED, dtype)
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
    words,  # descriptor of [out_features or twice as many, num_words]: ``Int4Panels`` in pairs
    scales,  # [groups, likewise]
    offsets,  # as scales, or None
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    row_tiles,
    num_tiles,  # of features and rows
    chunks,  # at least GROUPS
    blocks,
    out_features,
    GATED: gl.constexpr,
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
    gl.warp_specialize(
        [
            (_take_turns, (
                scales, offsets, bias, out, memory, num_tiles, chunks, blocks, rows, row_tiles,
                out_features, GATED, IN_BLOCK, SLOTS, 0,
            )),
            (_take_turns, (
                scales, offsets, bias, out, memory, num_tiles, chunks, blocks, rows, row_tiles,
                out_features, GATED, IN_BLOCK, SLOTS, 1,
            )),
            (_take_turns, (
                scales, offsets, bias, out, memory, num_tiles, chunks, blocks, rows, row_tiles,
                out_features, GATED, IN_BLOCK, SLOTS, 2,
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

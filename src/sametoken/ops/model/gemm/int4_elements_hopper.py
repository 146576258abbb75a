"""Elements of 4-bit weights on Hopper, in Gluon: made in pairs, where tensor cores read them.

A warp group makes the left operand [64, 128] of a product of words [64, 16] of ``Int4Panels``. Row
32 h + 8 w + q of the words is row 16 w + 8 h + q of the product, so a thread multiplies what it
makes, and has sums of a gate and its up.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
# mypy: disable-error-code=assignment
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sametoken.ops.hopper_layouts import products
from sametoken.ops.model.gemm.int4_elements_triton import on_base, ones


@gluon.constexpr_function
def loaded(blocks):
    """Registers of words [64, 16 * blocks]: four neighbours of each of a thread's rows."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0], *([0, 16 << bit] for bit in range(blocks.bit_length() - 1))],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [64, 16 * blocks],
    )


@gluon.jit
def rows_of_product(first, out_features, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's row of each row of a product from feature ``first`` on, at most the last."""
    row = gl.arange(0, 64, layout=LAYOUT)
    low, half = row // 16 * 8 + row % 8, row // 8 % 2
    if GATED:
        return gl.minimum(first + low, out_features - 1) + half * out_features
    return gl.minimum(first + half * 32 + low, out_features - 1)


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


@gluon.constexpr_function
def _e2m1_code(pair):
    """PTX of a pair's elements in bf16: likewise of ``int4.e2m1_words``."""
    if pair < 3:
        numbers = f"shl.b32 pair, $1, {6 - 3 * pair}; and.b32 pair, pair, 0x81C081C0;"
    else:
        numbers = """
        shr.b32 pair, $1, 6;
        and.b32 pair, pair, 0x01800180;
        shr.b32 bits, $1, 5;
        lop3.b32 pair, bits, 0x00400040, pair, 0xEA;
        shl.b32 bits, $1, 5;
        lop3.b32 pair, bits, 0x80008000, pair, 0xEA;"""
    return f"""{{
        .reg .b32 pair, bits, zeros;
        mov.b32 zeros, 0x80008000;
        {numbers}
        fma.rn.bf16x2 $0, pair, $2, zeros;
    }}"""


@gluon.jit
def _pair(
    words, scale, offset, PAIR: gl.constexpr, E2M1: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """``(code - zero) * scale`` of both values of a pair, or numbers of e2m1 times the scale.

    Each is rounded once.
    """
    if E2M1:
        NUMBERS: gl.constexpr = _e2m1_code(PAIR)
        return gl.inline_asm_elementwise(
            NUMBERS, "=r,r,r", [words, scale], dtype=gl.uint32, is_pure=True, pack=1
        )
    CODE: gl.constexpr = _pair_code(PAIR, dtype)
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r", [words, scale, offset], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _by_word(groups, begin: gl.constexpr, which: gl.constexpr, words, IN_BLOCK: gl.constexpr):
    """Values [64] of a block's groups for the words [64, 4, groups, 4 / groups] of each."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, words.type.layout))
    if IN_BLOCK == 1:
        ROW: gl.constexpr = gl.SliceLayout(1, COLUMNS)
        one = gl.convert_layout(groups[begin][which], ROW, assert_trivial=True)
        values = gl.expand_dims(one, 1)
    else:
        values = gl.join(groups[begin][which], groups[begin + IN_BLOCK // 2][which])
        if IN_BLOCK == 4:
            others = gl.join(groups[begin + 1][which], groups[begin + 3][which])
            values = gl.join(values, others).reshape([64, 4])
        values = gl.convert_layout(values, COLUMNS, assert_trivial=True)
    return gl.broadcast(gl.expand_dims(gl.expand_dims(values, 1), 3), words)[0]


@gluon.jit
def elements(
    words, groups, begin: gl.constexpr, HAS_OFFSETS: gl.constexpr, E2M1: gl.constexpr,
    IN_BLOCK: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A block's elements [64, 128] as the left operand of a product with this many columns.

    Args:
        words: [64, 16], in the order of the product's rows.
        groups: (scale, offset) [64] int32 of each group as in ``Int4Panels``, from ``begin`` on;
            of e2m1 what ``scales_of_e2m1`` gives.
        HAS_OFFSETS: else half of all codes are negative.
    """
    words = words.reshape([64, 4, IN_BLOCK, 4 // IN_BLOCK])
    scale = _by_word(groups, begin, 0, words, IN_BLOCK)
    if HAS_OFFSETS:
        offset = _by_word(groups, begin, 1, words, IN_BLOCK)
    else:
        HALF: gl.constexpr = (on_base(8, dtype) | 0x8000_8000) - (1 << 32)
        offset = gl.full_like(scale, HALF)
    first = _pair(words, scale, offset, 0, E2M1, dtype)
    second = _pair(words, scale, offset, 1, E2M1, dtype)
    third = _pair(words, scale, offset, 2, E2M1, dtype)
    fourth = _pair(words, scale, offset, 3, E2M1, dtype)
    pairs = gl.join(gl.join(first, second), gl.join(third, fourth))
    halves = gl.join(pairs.to(gl.uint16), (pairs >> 16).to(gl.uint16)).to(dtype, bitcast=True)
    # From row, t, e, h, c, l, as ``int4.packed_words`` names them.
    ordered = halves.reshape([64, 4, 4, 2, 2, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, products(COLUMNS), 2)
    return gl.convert_layout(ordered, OPERAND, assert_trivial=True)


@gluon.jit
def scales_of_e2m1(packed):
    """Scales of four groups, as ``elements`` takes them, of bytes of E8M0 up to 128."""
    found = ()
    for group in gl.static_range(4):
        # 2^126 times a scale, twice as bf16.
        scale = ((packed >> (8 * group)) & 255) * 0x0080_0080 + 0x3F00_3F00
        found += ((scale, scale),)
    return found

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
from sametoken.ops.model.gemm.hopper_tiles import halves_of
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
    """PTX of a pair's elements in bf16: likewise of ``int4.e2m1_words``.

    Numbers are times 2^-126 at first, as the exponent's bias is 1, in bf16 127.
    """
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
def _pair(words, scale, offset, PAIR: gl.constexpr, FORM: gl.constexpr, dtype: gl.constexpr):
    """``(code - zero) * scale`` of both values of a pair, or numbers of e2m1 times the scale.

    Each is rounded once.
    """
    if FORM != "codes":
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


@gluon.constexpr_function
def lines_of(form, in_block):
    """Lines of ``Int4Panels.scales`` of a block with this many groups."""
    return {"codes": in_block, "powers": 1, "e4m3": 2}[form]


@gluon.jit
def elements(
    words, lines, begin: gl.constexpr, HAS_OFFSETS: gl.constexpr, FORM: gl.constexpr,
    IN_BLOCK: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A block's elements [64, 128] as the left operand of a product with this many columns.

    Args:
        words: [64, 16], in the order of the product's rows.
        lines: (scale, offset) [64] int32 of each line of ``Int4Panels.scales``, from ``begin`` on.
        HAS_OFFSETS: else half of all codes are negative.
        FORM: ``Int4Panels.made_by``.
        IN_BLOCK: groups of a block; of eight a word has two.
    """
    if FORM == "powers":
        groups = _scales_of_powers(lines[begin][0])
    elif FORM == "e4m3":
        groups = _scales_of_e4m3(lines[begin][0], lines[begin + 1][0])
    else:
        groups = lines
    FIRST: gl.constexpr = begin if FORM == "codes" else 0
    BY_WORD: gl.constexpr = min(IN_BLOCK, 4)
    words = words.reshape([64, 4, BY_WORD, 4 // BY_WORD])
    scale = _by_word(groups, FIRST, 0, words, BY_WORD)
    if HAS_OFFSETS:
        offset = _by_word(groups, FIRST, 1, words, BY_WORD)
    elif FORM == "codes":
        HALF: gl.constexpr = (on_base(8, dtype) | 0x8000_8000) - (1 << 32)
        offset = gl.full_like(scale, HALF)
    else:
        offset = scale
    first = _pair(words, scale, offset, 0, FORM, dtype)
    second = _pair(words, scale, offset, 1, FORM, dtype)
    if IN_BLOCK == 8:
        scale = _by_word(groups, FIRST + 4, 0, words, 4)
    third = _pair(words, scale, offset, 2, FORM, dtype)
    fourth = _pair(words, scale, offset, 3, FORM, dtype)
    pairs = gl.join(gl.join(first, second), gl.join(third, fourth))
    halves = gl.join(pairs.to(gl.uint16), (pairs >> 16).to(gl.uint16)).to(dtype, bitcast=True)
    # From row, t, e, h, c, l, as ``int4.packed_words`` names them.
    ordered = halves.reshape([64, 4, 4, 2, 2, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([64, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, products(COLUMNS), 2)
    return gl.convert_layout(ordered, OPERAND, assert_trivial=True)


@gluon.jit
def _scales_of_powers(packed):
    """Scales of a block's four groups, of bytes of E8M0 up to 128."""
    found = ()
    for group in gl.static_range(4):
        # 2^126 times a scale, twice as bf16.
        scale = ((packed >> (8 * group)) & 255) * 0x0080_0080 + 0x3F00_3F00
        found += ((scale, scale),)
    return found


#: PTX of 2^118 times a number of e4m3, twice as bf16: its exponent's bias is 7, in bf16 127.
_E4M3 = gl.constexpr("""{
    .reg .b32 number, power, zeros;
    mov.b32 zeros, 0x80008000;
    mov.b32 power, 0x7B807B80;
    fma.rn.bf16x2 number, $1, power, zeros;
    mov.b32 power, 0x7A807A80;
    fma.rn.bf16x2 $0, number, power, zeros;
}""")


@gluon.jit
def _scales_of_e4m3(even, odd):
    """Scales of a block's eight groups, even ones first."""
    found = ()
    for group in gl.static_range(8):
        packed = even if group < 4 else odd
        bits = ((packed >> (8 * (group % 4))) & 255) * 0x0010_0010
        scale = gl.inline_asm_elementwise(
            _E4M3, "=r,r", [bits], dtype=gl.uint32, is_pure=True, pack=1
        )
        found += ((scale, scale),)
    return found


@gluon.jit
def factored_halves(sums, factors, first, out_features, GATED: gl.constexpr):
    """``halves_of`` a product's sums, times factors.

    Args:
        sums: from feature ``first`` on.
        factors: of the weight's rows, or None.
        out_features: of gates, of which as many ups follow.
    """
    low, high = halves_of(sums)
    if factors is not None:
        feature = first + gl.arange(0, 32, layout=gl.SliceLayout(1, low.type.layout))
        other = feature + (out_features if GATED else 32)
        end = out_features * (2 if GATED else 1)
        low *= gl.load(factors + feature, mask=feature < out_features, other=0.0)[:, None]
        high *= gl.load(factors + other, mask=other < end, other=0.0)[:, None]
    return low, high

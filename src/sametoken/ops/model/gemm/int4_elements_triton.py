"""Elements of matrices of codes, made in registers from words in the order of ``packed_words``."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def on_base(code, dtype):
    """The bits of a code above a base of bf16 or fp16, in both halves of a word.

    The base's unit is its lowest bit, so a code in its lowest bits is added to it.
    """
    width = dtype.fp_mantissa_width
    return (dtype.exponent_bias + width << width | code) * 0x1_0001


@triton.constexpr_function
def ones(dtype):
    """The bits of 1 in bf16 or fp16, in both halves of a word."""
    return (dtype.exponent_bias << dtype.fp_mantissa_width) * 0x1_0001


@triton.jit
def rows_of_tile(first, out_features, GATED: tl.constexpr, FEATURES: tl.constexpr):
    """The weight's row of each row of words in a tile, and whether there is one.

    Threads hold rows 32 apart of the words that they load, and rows 8 apart of a matrix that they
    multiply; so rows are loaded in the order that makes the one the other (``_in_order``).
    """
    OWN: tl.constexpr = FEATURES // 2 if GATED else FEATURES
    SPAN: tl.constexpr = 64 if FEATURES > 64 else FEATURES
    at = tl.arange(0, FEATURES)
    inner = at % SPAN
    row = at // SPAN * SPAN + inner % (SPAN // 2) // 8 * 16 + inner // (SPAN // 2) * 8 + inner % 8
    feature = first + row % OWN
    return feature + row // OWN * out_features, feature < out_features


@triton.jit
def elements_of_block(
    words,
    tops,
    scales,
    offsets,
    block,
    w_row,
    present,
    num_rows,
    num_words,
    one,
    GROUPS: tl.constexpr,
    E2M1: tl.constexpr,  # ``Int4Panels.e2m1_kind``
    FUSED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Elements [features, 128] of a block, in registers in the order of a product's operand."""
    FEATURES: tl.constexpr = w_row.shape[0]
    TOP_BITS: tl.constexpr = 0 if tops is None else tops.dtype.element_ty.primitive_bitwidth // 8
    MINIMA: tl.constexpr = False if offsets is None else offsets.dtype.element_ty == tl.float32
    # Of four words; two halves of a word have a group each where groups have 16 features.
    BY_WORD: tl.constexpr = GROUPS if GROUPS < 4 else 4
    at = w_row.to(tl.int64)[:, None] * num_words + block * 16 + tl.arange(0, 16)[None, :]
    low = tl.load(words + at, present[:, None], other=0)
    low = low.reshape(FEATURES, 4, BY_WORD, 4 // BY_WORD)
    top = None
    if tops is not None:
        # In fours, like the words: a thread then has both.
        at = tl.max_contiguous(at, [1, 4])
        top = tl.load(tops + at, present[:, None], other=0).to(tl.int32)
        top = top.reshape(FEATURES, 4, BY_WORD, 4 // BY_WORD)
    group = block * GROUPS + tl.arange(0, BY_WORD) * (GROUPS // BY_WORD)
    of_group = group.to(tl.int64)[None, :] * num_rows + w_row[:, None]
    BYTES: tl.constexpr = E2M1 > 0 and scales.dtype.element_ty == tl.int32
    PAIRED: tl.constexpr = E2M1 == 0 and scales.dtype.element_ty == tl.int32
    # Half of all codes are negative.
    HALF: tl.constexpr = on_base(8, dtype) | 0x8000_8000 if PAIRED else 8 << TOP_BITS
    E4M3: tl.constexpr = BYTES and GROUPS == 8
    # Both numbers of a pair become elements by one product.
    TWOS: tl.constexpr = (E4M3 or E2M1 == 2) and dtype == tl.bfloat16
    line = block.to(tl.int64) * (GROUPS // 4)
    if BYTES:
        scale = _of_bytes(scales + line * num_rows, w_row, present, E4M3, TWOS)
    else:
        scale = _of_groups(scales, of_group, present)
    offset = _offsets_of(offsets, of_group, present, HALF)
    first = _pair(low, top, scale, offset, one, 0, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    second = _pair(low, top, scale, offset, one, 1, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    if GROUPS == 8:
        if BYTES:
            scale = _of_bytes(scales + (line + 1) * num_rows, w_row, present, True, TWOS)
        else:
            scale = _of_groups(scales, of_group + num_rows, present)
        offset = _offsets_of(offsets, of_group + num_rows, present, HALF)
    third = _pair(low, top, scale, offset, one, 2, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    fourth = _pair(low, top, scale, offset, one, 3, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    return _in_order(tl.join(tl.join(first, second), tl.join(third, fourth)), FEATURES)


@triton.jit
def _of_bytes(scales, w_row, present, E4M3: tl.constexpr, TWOS: tl.constexpr):
    """Scales of four groups from bytes of E8M0, or 2^-8 of those of e4m3, for their words.

    In fp32; with TWOS times 2^126, twice as bf16 in a word.
    """
    packed = tl.load(scales + w_row, present, other=0)
    byte = (packed[:, None] >> (tl.arange(0, 4) * 8)[None, :]) & 255
    # The bias of e4m3's exponent is 7, here 127.
    if E4M3 and TWOS:
        scale = _times((byte * 0x0010_0010).to(tl.uint32, bitcast=True), 0x7B80_7B80, tl.bfloat16)
        scale = _times(scale, 0x7A80_7A80, tl.bfloat16)
    elif E4M3:
        scale = (byte << 20).to(tl.float32, bitcast=True) * 2.0 ** (120 - 8)
    elif TWOS:
        scale = (byte * 0x0080_0080 + 0x3F00_3F00).to(tl.uint32, bitcast=True)
    else:
        # The smallest power, 2^-127, is subnormal.
        scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    return scale.reshape(w_row.shape[0], 1, 4, 1)


@triton.jit
def _of_groups(values, of_group, present):
    """Values of groups [features, groups], for the words of a row by fours."""
    FEATURES: tl.constexpr = of_group.shape[0]
    GROUPS: tl.constexpr = of_group.shape[1]
    return tl.load(values + of_group, present[:, None], other=0).reshape(FEATURES, 1, GROUPS, 1)


@triton.jit
def _offsets_of(offsets, of_group, present, HALF: tl.constexpr):
    """Offsets of groups as ``_of_groups``; without any, HALF is that of all."""
    if offsets is None:
        return tl.full([of_group.shape[0], 1, of_group.shape[1], 1], HALF, tl.uint32)
    else:
        return _of_groups(offsets, of_group, present)


@triton.jit
def _in_order(parts, FEATURES: tl.constexpr):
    """[features, 16 words, 2, 2, 2] to [features, 128]: ``int4.packed_words`` undone.

    Of the product's operand, a thread holds what is made of its own words: nothing moves.
    """
    SPANS: tl.constexpr = FEATURES // 64 if FEATURES > 64 else 1
    WARPS: tl.constexpr = FEATURES // 16 // SPANS
    parts = parts.reshape(SPANS, 2, WARPS, 8, 4, 4, 2, 2, 2)
    return parts.permute(0, 2, 1, 3, 5, 8, 7, 4, 6).reshape(FEATURES, 128)


@triton.jit
def _pair(
    low,
    top,
    scale,
    offset,
    one,
    PAIR: tl.constexpr,
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    TOP_BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    dtype: tl.constexpr,
):
    """The elements of a pair of values, next to each other."""
    if E2M1:
        numbers = _numbers(low.to(tl.uint32, bitcast=True), PAIR)
        if scale.dtype == tl.uint32:
            return _halves(_times(numbers, scale, dtype), dtype)
        both = _times(numbers, 0x7E80_7E80, tl.bfloat16)
        first, second = _half(both, 0, tl.bfloat16), _half(both, 1, tl.bfloat16)
        return tl.join((first * scale).to(dtype), (second * scale).to(dtype))
    if scale.dtype == tl.int32:
        return _from_codes(low, scale, offset, PAIR, dtype)
    # Their lowest bits are to be 12 and up.
    low = _shifted(low, 12 - 8 * PAIR)
    if TOP_BITS:
        top = _shifted(top, 12 - 2 * TOP_BITS * PAIR)
    return tl.join(
        _element(low, top, scale, offset, one, 0, FUSED, TOP_BITS, MINIMA, dtype),
        _element(low, top, scale, offset, one, 1, FUSED, TOP_BITS, MINIMA, dtype),
    )


@triton.jit
def _numbers(words, PAIR: tl.constexpr):
    """A pair of ``int4.e2m1_words``, times 2^-126 in bf16, in the halves of a word.

    The exponent's bias is 1, in bf16 127.
    """
    if PAIR < 3:
        return _shifted(words, 6 - 3 * PAIR) & 0x81C0_81C0
    sizes = ((words >> 6) & 0x0180_0180) | ((words >> 5) & 0x0040_0040)
    return sizes | ((words << 5) & 0x8000_8000)


@triton.jit
def _from_codes(words, scale, offset, PAIR: tl.constexpr, dtype: tl.constexpr):
    """``(code - zero) * scale`` of a pair of ``int4.pair_words``, each rounded once."""
    # Base plus code, and that less base and zero, are exact.
    BASE: tl.constexpr = on_base(0, dtype)
    ONES: tl.constexpr = ones(dtype)
    codes = _shifted(words.to(tl.uint32, bitcast=True), -4 * PAIR) & 0x000F_000F
    numbers = _fma(codes | BASE, ONES, offset.to(tl.uint32, bitcast=True), dtype)
    return _halves(_times(numbers, scale.to(tl.uint32, bitcast=True), dtype), dtype)


@triton.jit
def _times(pairs, by, dtype: tl.constexpr):
    """Products of both halves of words."""
    # Products less 0: products alone need Hopper.
    return _fma(pairs, by, 0x8000_8000, dtype)


@triton.jit
def _fma(pairs, by, plus, dtype: tl.constexpr):
    """``pairs * by + plus`` of both halves of words, each rounded once."""
    if _INTERPRETED:
        by, plus = by + (pairs & 0), plus + (pairs & 0)
        first = _half(pairs, 0, dtype) * _half(by, 0, dtype) + _half(plus, 0, dtype)
        second = _half(pairs, 1, dtype) * _half(by, 1, dtype) + _half(plus, 1, dtype)
        return _rounded(first, dtype) | _rounded(second, dtype) << 16
    KIND: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(
        "fma.rn." + KIND + " $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, by, plus],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """The bits of finite fp32 values in a dtype; the interpreter has no bf16."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return value.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _half(pairs, SECOND: tl.constexpr, dtype: tl.constexpr):
    """The numbers in one half of words, in fp32."""
    if dtype == tl.bfloat16:
        return (pairs & 0xFFFF_0000 if SECOND else pairs << 16).to(tl.float32, bitcast=True)
    half = (pairs >> 16 if SECOND else pairs).to(tl.uint16)
    return half.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Both halves of words, next to each other."""
    return tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(dtype, bitcast=True)


@triton.jit
def _shifted(bits, LEFT: tl.constexpr):
    """Bits moved up, or down by a negative number of places."""
    return bits << LEFT if LEFT >= 0 else bits >> -LEFT


@triton.jit
def _element(
    low,
    top,
    scale,
    offset,
    one,
    SECOND: tl.constexpr,
    FUSED: tl.constexpr,
    TOP_BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    dtype: tl.constexpr,
):
    """``(code - zero) * scale`` or ``code * scale + minimum`` of a pair's value, rounded once."""
    BIT: tl.constexpr = 12 + 4 * SECOND
    UNIT: tl.constexpr = 2.0 ** (23 - BIT)
    number = _fraction(low, BIT, 4, one)
    if TOP_BITS:
        # 1 + code / UNIT: all of these are exact.
        TOP: tl.constexpr = 2.0 ** (4 + (4 - TOP_BITS) * SECOND)
        number = _fraction(top, 12 + TOP_BITS * SECOND, TOP_BITS, one) * TOP + (number - TOP)
    if MINIMA:
        return tl.fma(number - 1.0, scale * UNIT, offset).to(dtype)
    zero = offset.to(tl.float32)
    if FUSED:
        # Every term has at most 24 bits.
        return tl.fma(number, scale * UNIT, -(UNIT + zero) * scale).to(dtype)
    return ((number - (1.0 + zero / UNIT)) * (scale * UNIT)).to(dtype)


@triton.jit
def _fraction(bits, BIT: tl.constexpr, NUM_BITS: tl.constexpr, one):
    """1 + value / 2^(23 - BIT) of a value whose lowest bit is ``BIT``."""
    return ((bits & (((1 << NUM_BITS) - 1) << BIT)) | one).to(tl.float32, bitcast=True)

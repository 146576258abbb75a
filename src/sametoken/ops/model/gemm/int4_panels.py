"""Matrices of codes as a GPU's products read them: words whose elements are made in registers.

A thread makes the elements that it multiplies, of words in the order of tensor cores' operands.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gemm.int4 import packed_words, unpacked_int4
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import Int4Matrix, IntegerMatrix

#: Features of a block: 16 words of eight 4-bit values in each row.
BLOCK = 128

#: The bits of 1.0. An argument, since an instruction has only one constant among its operands.
ONE = 0x3F80_0000


@dataclass(frozen=True, slots=True)
class Int4Panels:
    """A matrix of codes as the kernels read it, or E of 4 bits with a first dimension more.

    Codes are planes of bits: 4, and on top of them 2, 4 or none.

    Attributes:
        words: [N, 16 * blocks] int32, ``int4.packed_words``; zeros past ``in_features``.
        scales: fp32 [groups, N], those of whole blocks; zeros past ``in_features``. Those of E8M0
            are int32 [blocks, N], the bytes of a block's four groups, the first lowest.
        offsets: [groups, N]: int32 zeros, or fp32 minima; None: half of all codes are negative, or
            they are of e2m1.
        in_features: K.
        e2m1: whether codes are of e2m1.
        fused: whether an element is exact in one multiply-add, as scales have 16 bits.
        tops: likewise of the codes' bits 4 and up, int16 of 2 or int32 of 4 bits; None: of none.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    in_features: int
    e2m1: bool
    fused: bool
    tops: Tensor | None = None

    @classmethod
    def of(cls, matrix: Int4Matrix | IntegerMatrix) -> Int4Panels:
        """Take over a matrix, not its order."""
        if isinstance(matrix, Int4Matrix):
            codes, bits, offset = unpacked_int4(matrix.values, matrix.width), 4, matrix.zero
            if offset is not None and bool((offset == 8).all()):
                offset = None
        else:
            codes, bits, offset = matrix.codes, matrix.bits, matrix.minimum
            assert offset is not None or matrix.zero == 1 << bits - 1
        words = packed_words(codes & 15)
        num_groups = words.shape[1] * 8 // matrix.width
        if offset is not None:
            kept = offset.float() if offset.is_floating_point() else offset.int()
            offset = _by_group(kept, num_groups)
        if matrix.scale.dtype == torch.float8_e8m0fnu:
            scales = _e8m0_by_block(matrix.scale)
        else:
            scales = _by_group(matrix.scale.float(), num_groups)
        return cls(
            words,
            scales,
            offset,
            codes.shape[1],
            e2m1=isinstance(matrix, Int4Matrix) and matrix.zero is None,
            fused=matrix.scale.dtype.itemsize == 2,
            tops=None if bits == 4 else packed_words(codes >> 4, 2 if bits <= 6 else 4),
        )

    @property
    def form(self) -> tuple[int, torch.dtype, int, bool, bool, bool]:
        """What kernels depend on: groups and their scales, bits on top, e2m1, fused, minima."""
        # An int16 has eight times 2 bits, an int32 eight times 4.
        top_bits = 0 if self.tops is None else self.tops.itemsize
        has_minima = self.offsets is not None and self.offsets.is_floating_point()
        return self.width, self.scales.dtype, top_bits, self.e2m1, self.fused, has_minima

    def is_like(self, other: Int4Panels) -> bool:
        """Whether both have one form and shape, and may be stacked."""
        mine, others = ((each.out_features, each.in_features, each.form) for each in (self, other))
        return mine == others

    @classmethod
    def stacked(cls, alike: Sequence[Int4Panels]) -> Int4Panels:
        """4-bit matrices of one form as one tensor for each of their parts."""
        assert alike[0].tops is None
        offsets = None
        if any(one.offsets is not None for one in alike):
            plain = torch.full_like(alike[0].scales, 8, dtype=torch.int32)
            offsets = torch.stack([plain if one.offsets is None else one.offsets for one in alike])
        return replace(
            alike[0],
            words=torch.stack([one.words for one in alike]),
            scales=torch.stack([one.scales for one in alike]),
            offsets=offsets,
        )

    def cut(self, rows: Tensor) -> Int4Panels:
        """Some rows of one matrix: [N'] int64."""
        tops = None if self.tops is None else self.tops[rows]
        offsets = None if self.offsets is None else self.offsets[:, rows].contiguous()
        scales = self.scales[:, rows].contiguous()
        return replace(self, words=self.words[rows], scales=scales, offsets=offsets, tops=tops)

    def expanded(self, dtype: torch.dtype, row_ids: Tensor | None = None) -> Tensor:
        """The matrix of elements, or its rows of given numbers [T] int64: [N or T, K]."""
        n, k = self.out_features if row_ids is None else row_ids.shape[0], self.in_features
        out = torch.empty(n, k, dtype=dtype, device=self.words.device)
        if not n:
            return out
        _expand_kernel[(triton.cdiv(n, 64), triton.cdiv(k, BLOCK))](
            self.words,
            self.tops,
            self.scales,
            self.offsets,
            row_ids,
            out,
            n,
            self.out_features,
            k,
            self.words.shape[1],
            ONE,
            WIDTH=self.width,
            E2M1=self.e2m1,
            FUSED=self.fused,
            BLOCK_FEATURES=64,
            num_warps=4,
            **pdl_options(out),
        )
        return out

    @property
    def out_features(self) -> int:
        """N."""
        return self.words.shape[-2]

    @property
    def width(self) -> int:
        """Features of a group."""
        if self.scales.dtype == torch.int32:
            return BLOCK // 4
        return 8 * self.words.shape[-1] // self.scales.shape[-2]

    @property
    def block_bytes(self) -> int:
        """Bytes of a row's block."""
        return self.nbytes // (self.words[..., 0].numel() * (self.words.shape[-1] // 16))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, and zeros or minima."""
        parts = (self.words, self.tops, self.scales, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)


def _by_group(of_rows: Tensor, num_groups: int) -> Tensor:
    """[N, groups] to [num_groups, N], zeros in those that are new."""
    padded = torch.nn.functional.pad(of_rows, (0, num_groups - of_rows.shape[1]))
    return padded.t().contiguous()


def _e8m0_by_block(of_rows: Tensor) -> Tensor:
    """[N, groups] of E8M0 to the int32 of ``Int4Panels.scales``, bytes of 0 in new groups."""
    padded = torch.nn.functional.pad(of_rows.view(torch.uint8), (0, -of_rows.shape[1] % 4))
    return padded.contiguous().view(torch.int32).t().contiguous()


@triton.jit
def _expand_kernel(
    words,
    tops,
    scales,
    offsets,
    row_ids,  # [num_out], or None
    out,  # [num_out, in_features], written
    num_out,
    out_features,
    in_features,
    num_words,
    one,
    WIDTH: tl.constexpr,
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    first, block = tl.program_id(0) * BLOCK_FEATURES, tl.program_id(1)
    w_row, present = _rows_of_tile(first, num_out, False, BLOCK_FEATURES)
    if row_ids is not None:
        w_row = tl.load(row_ids + w_row, present, other=0)
    tile = _elements(
        words, tops, scales, offsets, block, w_row, present, out_features, num_words, one,
        128 // WIDTH, E2M1, FUSED, out.dtype.element_ty,
    )  # fmt: skip
    row = first + tl.arange(0, BLOCK_FEATURES)
    k = block * 128 + tl.arange(0, 128)
    at = out + row.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(at, tile, (row < num_out)[:, None] & (k < in_features)[None, :])


@triton.jit
def gate_and_up(acc):
    """The halves of sums [features, rows]."""
    halves = acc.reshape(2, acc.shape[0] // 2, acc.shape[1])
    return tl.split(halves.permute(1, 2, 0))


@triton.jit
def int4_sums(
    x_at,  # [rows, 1], where each row of activations begins
    is_row,
    words,  # as for ``_int4_kernel``
    tops,
    scales,
    offsets,
    first,  # feature of the tile
    out_features,  # rows of the weight, with GATED before those of up
    in_features,
    num_words,
    one,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Sums of the products in order: [features, rows] fp32; with GATED half of them are of up.

    Everything that an iteration needs is loaded by the pipeline.
    """
    # Of a block, as globals cannot be read here.
    DEPTH: tl.constexpr = 128
    GROUPS: tl.constexpr = DEPTH // WIDTH
    w_row, present = _rows_of_tile(first, out_features, GATED, BLOCK_FEATURES)
    num_rows = out_features * 2 if GATED else out_features
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([BLOCK_FEATURES, is_row.shape[0]], tl.float32)
    for step in tl.range(0, num_words // (16 * UNROLL)):
        for part in tl.static_range(UNROLL):
            block = step * UNROLL + part
            k = block * DEPTH + depth
            inside = is_row[:, None]
            if not EVEN:
                inside = inside & (k < in_features)[None, :]
            x_tile = tl.load(x_at + k[None, :], inside, other=0.0)
            w_tile = _elements(
                words, tops, scales, offsets, block, w_row, present, num_rows, num_words, one,
                GROUPS, E2M1, FUSED, x_tile.dtype,
            )  # fmt: skip
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _rows_of_tile(first, out_features, GATED: tl.constexpr, FEATURES: tl.constexpr):
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
def _elements(
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
    E2M1: tl.constexpr,
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
    if scales.dtype.element_ty == tl.int32:
        scale = _powers(scales, block, w_row, present, num_rows)
    else:
        scale = _of_groups(scales, of_group, present)
    offset = tl.full([FEATURES, 1, BY_WORD, 1], 8 << TOP_BITS, tl.int32)
    if offsets is not None:
        offset = _of_groups(offsets, of_group, present)
    first = _pair(low, top, scale, offset, one, 0, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    second = _pair(low, top, scale, offset, one, 1, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    if GROUPS == 8:
        scale = _of_groups(scales, of_group + num_rows, present)
        if offsets is not None:
            offset = _of_groups(offsets, of_group + num_rows, present)
    third = _pair(low, top, scale, offset, one, 2, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    fourth = _pair(low, top, scale, offset, one, 3, E2M1, FUSED, TOP_BITS, MINIMA, dtype)
    return _in_order(tl.join(tl.join(first, second), tl.join(third, fourth)), FEATURES)


@triton.jit
def _powers(scales, block, w_row, present, num_rows):
    """The powers of two of a block's four groups, from bytes of E8M0, for their words."""
    packed = tl.load(scales + block.to(tl.int64) * num_rows + w_row, present, other=0)
    byte = (packed[:, None] >> (tl.arange(0, 4) * 8)[None, :]) & 255
    # The smallest, 2^-127, is subnormal.
    powers = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    return powers.reshape(w_row.shape[0], 1, 4, 1)


@triton.jit
def _of_groups(values, of_group, present):
    """Values of groups [features, groups], for the words of a row by fours."""
    FEATURES: tl.constexpr = of_group.shape[0]
    GROUPS: tl.constexpr = of_group.shape[1]
    return tl.load(values + of_group, present[:, None], other=0).reshape(FEATURES, 1, GROUPS, 1)


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
    # Their lowest bits are to be 12 and up.
    low = _shifted(low, 12 - 8 * PAIR)
    if TOP_BITS:
        top = _shifted(top, 12 - 2 * TOP_BITS * PAIR)
    return tl.join(
        _element(low, top, scale, offset, one, 0, E2M1, FUSED, TOP_BITS, MINIMA, dtype),
        _element(low, top, scale, offset, one, 1, E2M1, FUSED, TOP_BITS, MINIMA, dtype),
    )


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
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    TOP_BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    dtype: tl.constexpr,
):
    """``(code - zero) * scale`` or ``code * scale + minimum`` of a pair's value, rounded once."""
    BIT: tl.constexpr = 12 + 4 * SECOND
    if E2M1:
        # The exponent's bias is 1, here 127.
        size = (low & (7 << BIT)) << (22 - BIT)
        sign = (low & (8 << BIT)) << (28 - BIT)
        return ((size | sign).to(tl.float32, bitcast=True) * 2.0**126 * scale).to(dtype)
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

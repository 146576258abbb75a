"""4-bit matrices as a GPU's products read them: words whose elements are made in registers.

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

from sametoken.ops.model.gemm.int4 import packed_words
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import Int4Matrix

#: Features of a block: 16 words of eight 4-bit values in each row.
BLOCK = 128

#: The zero of weights that store none.
SYMMETRIC = 8

#: The bits of 1.0. An argument, since an instruction has only one constant among its operands.
ONE = 0x3F80_0000


@dataclass(frozen=True, slots=True)
class Int4Panels:
    """A 4-bit matrix as the kernels read it, or E of them with a first dimension more.

    Attributes:
        words: [N, 16 * blocks] int32, ``int4.packed_words``; zeros past ``in_features``.
        scales: fp32 [groups, N], those of whole blocks; zeros past ``in_features``. Those of E8M0
            are int32 [blocks, N], the bytes of a block's four groups, the first lowest.
        zeros: [groups, N] int32; None: all are ``SYMMETRIC``, or values are codes of e2m1.
        in_features: K.
        e2m1: whether values are codes of e2m1.
        fused: whether an element is exact in one multiply-add, as scales have 16 bits.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    e2m1: bool
    fused: bool

    @classmethod
    def of(cls, matrix: Int4Matrix) -> Int4Panels:
        """Take over a matrix, not its order."""
        words = packed_words(matrix)
        num_groups = words.shape[1] * 8 // matrix.width
        zeros = matrix.zero
        if zeros is not None and bool((zeros == SYMMETRIC).all()):
            zeros = None
        return cls(
            words,
            _e8m0_by_block(matrix.scale)
            if matrix.scale.dtype == torch.float8_e8m0fnu
            else _by_group(matrix.scale.float(), num_groups),
            None if zeros is None else _by_group(zeros.int(), num_groups),
            2 * matrix.values.shape[1],
            e2m1=matrix.zero is None,
            fused=matrix.scale.dtype.itemsize == 2,
        )

    def is_like(self, other: Int4Panels) -> bool:
        """Whether both have one form, and may be stacked."""
        mine, others = (
            (
                each.words.shape,
                each.scales.shape,
                each.width,
                each.in_features,
                each.e2m1,
                each.fused,
            )
            for each in (self, other)
        )
        return mine == others

    @classmethod
    def stacked(cls, alike: Sequence[Int4Panels]) -> Int4Panels:
        """Matrices of one form as one tensor for each of their parts."""
        zeros = None
        if any(one.zeros is not None for one in alike):
            plain = torch.full_like(alike[0].scales, SYMMETRIC, dtype=torch.int32)
            zeros = torch.stack([plain if one.zeros is None else one.zeros for one in alike])
        return replace(
            alike[0],
            words=torch.stack([one.words for one in alike]),
            scales=torch.stack([one.scales for one in alike]),
            zeros=zeros,
        )

    def cut(self, rows: Tensor) -> Int4Panels:
        """Some rows of one matrix: [N'] int64."""
        zeros = None if self.zeros is None else self.zeros[:, rows].contiguous()
        scales = self.scales[:, rows].contiguous()
        return replace(self, words=self.words[rows], scales=scales, zeros=zeros)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix of elements: [N, K]."""
        n, k = self.out_features, self.in_features
        out = torch.empty(n, k, dtype=dtype, device=self.words.device)
        _expand_kernel[(triton.cdiv(n, 64), triton.cdiv(k, BLOCK))](
            self.words,
            self.scales,
            self.zeros,
            out,
            n,
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
    def nbytes(self) -> int:
        """Bytes of values, scales and zeros."""
        parts = (self.words, self.scales, self.zeros)
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
    scales,
    zeros,
    out,  # [out_features, in_features], written
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
    w_row, present = _rows_of_tile(first, out_features, False, BLOCK_FEATURES)
    tile = _elements(
        words, scales, zeros, block, w_row, present, out_features, num_words, one,
        128 // WIDTH, E2M1, FUSED, out.dtype.element_ty,
    )  # fmt: skip
    feature = first + tl.arange(0, BLOCK_FEATURES)
    k = block * 128 + tl.arange(0, 128)
    at = out + feature.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(at, tile, (feature < out_features)[:, None] & (k < in_features)[None, :])


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
    scales,
    zeros,
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
                words, scales, zeros, block, w_row, present, num_rows, num_words, one,
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
    scales,
    zeros,
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
    at = words + w_row.to(tl.int64)[:, None] * num_words + block * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(at, present[:, None], other=0)
    group = block * GROUPS + tl.arange(0, GROUPS)
    of_group = group.to(tl.int64)[None, :] * num_rows + w_row[:, None]
    if scales.dtype.element_ty == tl.int32:
        scale = _powers(scales, block, w_row, present, num_rows)
    else:
        scale = tl.load(scales + of_group, present[:, None], other=0.0)
    zero = tl.full([FEATURES, GROUPS], 8, tl.int32)
    if zeros is not None:
        zero = tl.load(zeros + of_group, present[:, None], other=0)
    packed = packed.reshape(FEATURES, 4, GROUPS, 4 // GROUPS)
    scale = scale.reshape(FEATURES, 1, GROUPS, 1)
    zero = zero.reshape(FEATURES, 1, GROUPS, 1).to(tl.float32)
    first = _pair(packed << 12, scale, zero, one, E2M1, FUSED, dtype)
    second = _pair(packed << 4, scale, zero, one, E2M1, FUSED, dtype)
    third = _pair(packed >> 4, scale, zero, one, E2M1, FUSED, dtype)
    fourth = _pair(packed >> 12, scale, zero, one, E2M1, FUSED, dtype)
    return _in_order(tl.join(tl.join(first, second), tl.join(third, fourth)), FEATURES)


@triton.jit
def _powers(scales, block, w_row, present, num_rows):
    """The powers of two of a block's four groups, from bytes of E8M0: [features, 4] fp32."""
    packed = tl.load(scales + block.to(tl.int64) * num_rows + w_row, present, other=0)
    byte = (packed[:, None] >> (tl.arange(0, 4) * 8)[None, :]) & 255
    # The smallest, 2^-127, is subnormal.
    return tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)


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
def _pair(bits, scale, zero, one, E2M1: tl.constexpr, FUSED: tl.constexpr, dtype: tl.constexpr):
    """The elements of the values in bits 12 to 15 and 16 to 19, next to each other."""
    return tl.join(
        _element(bits, 12, scale, zero, one, E2M1, FUSED, dtype),
        _element(bits, 16, scale, zero, one, E2M1, FUSED, dtype),
    )


@triton.jit
def _element(
    bits,
    BIT: tl.constexpr,
    scale,
    zero,
    one,
    E2M1: tl.constexpr,
    FUSED: tl.constexpr,
    dtype: tl.constexpr,
):
    """``(value - zero) * scale`` of a value whose lowest bit is ``BIT``, rounded once."""
    if E2M1:
        # The exponent's bias is 1, here 127.
        size = (bits & (7 << BIT)) << (22 - BIT)
        sign = (bits & (8 << BIT)) << (28 - BIT)
        return ((size | sign).to(tl.float32, bitcast=True) * 2.0**126 * scale).to(dtype)
    else:
        # As a fraction: 1 + value / UNIT.
        UNIT: tl.constexpr = 2.0 ** (23 - BIT)
        number = ((bits & (15 << BIT)) | one).to(tl.float32, bitcast=True)
        if FUSED:
            # Every term has at most 24 bits.
            return tl.fma(number, scale * UNIT, -(UNIT + zero) * scale).to(dtype)
        else:
            return ((number - (1.0 + zero / UNIT)) * (scale * UNIT)).to(dtype)

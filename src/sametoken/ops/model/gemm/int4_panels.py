"""Matrices of codes as a GPU's products read them: words whose elements are made in registers.

A thread makes the elements that it multiplies, of words in the order of tensor cores' operands.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gemm.int4 import e2m1_words, packed_words, pair_words, unpacked_int4
from sametoken.ops.model.gemm.int4_elements_triton import elements_of_block, rows_of_tile
from sametoken.ops.model.gemm.triton import finished
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import Int4Matrix, IntegerMatrix

#: Forms of elements that are made in pairs, as ``Int4Panels.made_by`` names them.
Pairs = Literal["codes", "powers", "e4m3"]

#: Features of a block: 16 words of eight 4-bit values in each row.
BLOCK = 128

#: E8M0's 2.
_TWO = 128

#: The bits of 1.0. An argument, since an instruction has only one constant among its operands.
ONE = 0x3F80_0000


@dataclass(frozen=True, slots=True)
class Int4Panels:
    """A matrix of codes as the kernels read it, or E of 4 bits with a first dimension more.

    Codes are planes of bits: 4, and on top of them 2, 4 or none. Where scales have the rows' dtype
    of 16 bits, both elements of a pair are made at once, in that dtype.

    Attributes:
        words: [N, 16 * blocks] int32, ``int4.packed_words``, ``int4.pair_words`` of pairs, or
            ``int4.e2m1_words`` of e2m1; zeros past ``in_features``.
        scales: fp32 [groups, N], those of whole blocks; zeros past ``in_features``. Of pairs they
            stand in both halves of an int32. In 8 bits they are bytes in int32: of E8M0
            [blocks, N], a block's four groups, the first lowest; of e4m3 [2 * blocks, N], the even
            ones of a block's eight groups, then the odd ones. Where no scale of E8M0 is above 2
            they are in uint32: 2^126 times a scale is a number of bf16, an element one product. So
            new weights whose scales are above 2 do not take their place.
        offsets: [groups, N]: int32 zeros, or fp32 minima; of pairs -(base + zero) as in
            ``on_base``, in both halves of an int32. None: half of all codes are negative, or they
            are of e2m1.
        in_features: K.
        e2m1: whether codes are of e2m1.
        fused: whether an element is exact in one multiply-add, as scales have 16 bits.
        tops: likewise of the codes' bits 4 and up, int16 of 2 or int32 of 4 bits; None: of none.
        factors: [N] fp32, of a row's sums, with scales of e4m3; None: 1. They are 2^8 times the
            matrix's, for all elements are 2^-8 of its.
        paired: the dtype of elements that are made in pairs; None: they are made one by one.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    in_features: int
    e2m1: bool
    fused: bool
    tops: Tensor | None = None
    factors: Tensor | None = None
    paired: torch.dtype | None = None

    @classmethod
    def of(cls, matrix: Int4Matrix | IntegerMatrix, dtype: torch.dtype) -> Int4Panels:
        """Take over a matrix, not its order, for products with rows of this dtype."""
        factors, in_pairs = None, matrix.scale.dtype == dtype and dtype.itemsize == 2
        if isinstance(matrix, Int4Matrix) and matrix.zero is not None and in_pairs:
            return cls._in_pairs(matrix, matrix.zero)
        if isinstance(matrix, Int4Matrix):
            codes, bits, offset = unpacked_int4(matrix.values, matrix.width), 4, matrix.zero
            factors = None if matrix.factor is None else matrix.factor * 2**8
            if offset is not None and bool((offset == 8).all()):
                offset = None
        else:
            codes, bits, offset = matrix.codes, matrix.bits, matrix.minimum
            assert offset is not None or matrix.zero == 1 << bits - 1
        e2m1 = isinstance(matrix, Int4Matrix) and matrix.zero is None
        words = e2m1_words(codes) if e2m1 else packed_words(codes & 15)
        num_groups = words.shape[1] * 8 // matrix.width
        if offset is not None:
            kept = offset.float() if offset.is_floating_point() else offset.int()
            offset = _by_group(kept, num_groups)
        if matrix.scale.itemsize == 1:
            powers = matrix.scale.view(torch.uint8)
            scales = _bytes_by_block(powers, BLOCK // matrix.width)
            is_power = BLOCK // matrix.width == 4
            if is_power and not powers.is_meta and bool((powers <= _TWO).all()):
                scales = scales.view(torch.uint32)
        else:
            scales = _by_group(matrix.scale.float(), num_groups)
        return cls(
            words,
            scales,
            offset,
            codes.shape[1],
            e2m1=e2m1,
            fused=matrix.scale.dtype.itemsize == 2,
            tops=None if bits == 4 else packed_words(codes >> 4, 2 if bits <= 6 else 4),
            factors=factors,
        )

    @classmethod
    def _in_pairs(cls, matrix: Int4Matrix, zero: Tensor) -> Int4Panels:
        codes, dtype, offsets = unpacked_int4(matrix.values, matrix.width), matrix.scale.dtype, None
        words = pair_words(codes)
        num_groups = words.shape[1] * 8 // matrix.width
        if not bool((zero == 8).all()):
            offsets = _by_group(_offset(zero.to(dtype)), num_groups)
        scales = _by_group(_doubled(matrix.scale), num_groups)
        return cls(words, scales, offsets, codes.shape[1], e2m1=False, fused=True, paired=dtype)

    @property
    def form(self) -> tuple[int | torch.dtype | None, ...]:
        """What kernels depend on, except shapes and whether there are offsets."""
        # An int16 has eight times 2 bits, an int32 eight times 4.
        top_bits = 0 if self.tops is None else self.tops.itemsize
        has_minima = self.offsets is not None and self.offsets.is_floating_point()
        has_factors = self.factors is not None
        codes = top_bits, self.e2m1, self.fused, self.paired
        return self.width, self.kernel_scales.dtype, *codes, has_minima, has_factors

    @property
    def kernel_scales(self) -> Tensor:
        """The scales as kernels read them, beside ``e2m1_kind``: those of uint32 as int32."""
        return self.scales.view(torch.int32) if self._is_small else self.scales

    @property
    def e2m1_kind(self) -> int:
        """For kernels: 0 if codes are integers, 2 if they are of e2m1 and none above 2, else 1."""
        return self.e2m1 + self._is_small

    @property
    def _is_small(self) -> bool:
        return self.scales.dtype == torch.uint32

    def made_by(self, dtype: torch.dtype) -> Pairs | None:
        """How both elements of a pair are made at once for rows of this dtype; None: they are not.

        "codes": of integers; of e2m1 "powers" or "e4m3", by scales.
        """
        if self.tops is not None:
            return None
        if self.paired == dtype and self.width >= 32:
            return "codes"
        if dtype == torch.bfloat16 and self.factors is not None:
            return "e4m3"
        return "powers" if dtype == torch.bfloat16 and self._is_small else None

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
            plain = torch.full_like(alike[0].kernel_scales, 8, dtype=torch.int32)
            if alike[0].paired is not None:
                plain = _offset(plain.to(alike[0].paired))
            offsets = torch.stack([plain if one.offsets is None else one.offsets for one in alike])
        factors = [one.factors for one in alike if one.factors is not None]
        scales = torch.stack([one.kernel_scales for one in alike])
        if all(one._is_small for one in alike):
            scales = scales.view(torch.uint32)
        return replace(
            alike[0],
            words=torch.stack([one.words for one in alike]),
            scales=scales,
            offsets=offsets,
            factors=torch.stack(factors) if factors else None,
        )

    def cut(self, rows: Tensor) -> Int4Panels:
        """Some rows of one matrix: [N'] int64."""
        tops = None if self.tops is None else self.tops[rows]
        offsets = None if self.offsets is None else self.offsets[:, rows].contiguous()
        factors = None if self.factors is None else self.factors[rows]
        words, scales = self.words[rows], self.kernel_scales[:, rows].contiguous()
        cut = replace(self, words=words, scales=scales.view(self.scales.dtype), offsets=offsets)
        return replace(cut, tops=tops, factors=factors)

    def expanded(self, dtype: torch.dtype, row_ids: Tensor | None = None) -> Tensor:
        """The matrix of elements, without factors, or its rows of given numbers: [N or T, K].

        Args:
            dtype: of elements.
            row_ids: [T] int64, of rows; None: all.
        """
        assert self.paired in (None, dtype)
        n, k = self.out_features if row_ids is None else row_ids.shape[0], self.in_features
        out = torch.empty(n, k, dtype=dtype, device=self.words.device)
        if not n:
            return out
        _expand_kernel[(triton.cdiv(n, 64), triton.cdiv(k, BLOCK))](
            self.words,
            self.tops,
            self.kernel_scales,
            self.offsets,
            row_ids,
            out,
            n,
            self.out_features,
            k,
            self.words.shape[1],
            ONE,
            WIDTH=self.width,
            E2M1=self.e2m1_kind,
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
    def num_elements(self) -> int:
        """Elements of all its matrices."""
        return self.words[..., 0].numel() * self.in_features

    @property
    def width(self) -> int:
        """Features of a group."""
        in_one = 4 if self.e2m1 and self.kernel_scales.dtype == torch.int32 else 1
        return 8 * self.words.shape[-1] // (self.scales.shape[-2] * in_one)

    @property
    def block_bytes(self) -> int:
        """Bytes of a row's block."""
        return self.nbytes // (self.words[..., 0].numel() * (self.words.shape[-1] // 16))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, and zeros, minima or factors."""
        parts = (self.words, self.tops, self.scales, self.offsets, self.factors)
        return sum(part.nbytes for part in parts if part is not None)


def _doubled(values: Tensor) -> Tensor:
    """Values of 16 bits in both halves of an int32."""
    halves: Tensor = torch.stack((values, values), dim=-1).view(torch.int32)
    return halves.squeeze(-1)


def _offset(zeros: Tensor) -> Tensor:
    """What turns a base plus a code into a code less its zero, twice in an int32."""
    return _doubled(-(zeros + 1 / torch.finfo(zeros.dtype).eps))


def _by_group(of_rows: Tensor, num_groups: int) -> Tensor:
    """[N, groups] to [num_groups, N], zeros in those that are new."""
    padded = torch.nn.functional.pad(of_rows, (0, num_groups - of_rows.shape[1]))
    return padded.t().contiguous()


def _bytes_by_block(of_rows: Tensor, groups: int) -> Tensor:
    """Bytes [N, num_groups] to the int32 of ``Int4Panels.scales``, bytes of 0 in new groups.

    Args:
        of_rows: uint8.
        groups: of a block, 4 or 8.
    """
    padded = torch.nn.functional.pad(of_rows, (0, -of_rows.shape[1] % groups))
    in_order = padded.unflatten(1, (-1, 4, groups // 4)).transpose(2, 3).contiguous()
    words: Tensor = in_order.flatten(1).view(torch.int32)
    return words.t().contiguous()


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
    w_row, present = rows_of_tile(first, num_out, False, BLOCK_FEATURES)
    if row_ids is not None:
        w_row = tl.load(row_ids + w_row, present, other=0)
    tile = elements_of_block(
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
    factors,
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
    """Sums of the products in order, times factors, if any: [features, rows] fp32.

    With GATED half of them are of up. Everything that an iteration needs is loaded by the pipeline.
    """
    # Of a block, as globals cannot be read here.
    DEPTH: tl.constexpr = 128
    GROUPS: tl.constexpr = DEPTH // WIDTH
    w_row, present = rows_of_tile(first, out_features, GATED, BLOCK_FEATURES)
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
            w_tile = elements_of_block(
                words, tops, scales, offsets, block, w_row, present, num_rows, num_words,
                one, GROUPS, E2M1, FUSED, x_tile.dtype,
            )  # fmt: skip
            acc = finished(tl.dot(w_tile, x_tile.T, acc, input_precision="ieee"))
    if factors is not None:
        OWN: tl.constexpr = BLOCK_FEATURES // 2 if GATED else BLOCK_FEATURES
        row = tl.arange(0, BLOCK_FEATURES)
        feature = first + row % OWN
        at = factors + feature + row // OWN * out_features
        acc *= tl.load(at, feature < out_features, other=0)[:, None]
    return acc

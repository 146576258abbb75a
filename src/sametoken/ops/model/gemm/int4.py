"""Products with 4-bit weights in plain PyTorch: those of the matrix of elements.

An element is rounded once, to the dtype of the activations
(docs/decisions/0029-products-of-quantized-weights.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.reference import product_fp32
from sametoken.ops.weight import Int4Matrix, IntegerMatrix

#: The numbers of e2m1 by their code.
E2M1 = tuple(
    sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)


def packed_int4(values: Tensor, width: int) -> Tensor:
    """[N, K] uint8 below 16 to the bytes of ``Int4Matrix``, [N, K / 2]."""
    low, high = values.unflatten(1, (-1, 2, width // 2)).unbind(2)
    packed: Tensor = low | high << 4
    return packed.flatten(1)


def unpacked_int4(packed: Tensor, width: int) -> Tensor:
    """The inverse of ``packed_int4``."""
    bytes_by_group = packed.unflatten(1, (-1, width // 2))
    return torch.cat((bytes_by_group & 15, bytes_by_group >> 4), dim=2).flatten(1)


def packed_words(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes of 4 or 2 bits in the order in which a GPU's threads multiply them.

    Word 4 t + e of a block of 128 features holds its features 32 e + 16 c + 8 h + 2 t + l, in bits
    (4 c + 2 h + l) * ``bits`` and up. The last block is filled with zeros.

    Args:
        codes: [N, K] uint8.
        bits: of a code.

    Returns:
        [N, 16 * blocks], int32 of 4 bits, int16 of 2.
    """
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 128))
    low, high = codes.unflatten(1, (-1, 4, 2, 2, 4, 2)).unbind(6)
    packed = (low | high << bits).permute(0, 1, 5, 2, 3, 4)
    if bits == 2:
        packed = packed[..., 0] | packed[..., 1] << 4
    words: Tensor = packed.contiguous().flatten(1).view(torch.int32 if bits == 4 else torch.int16)
    return words


def pair_words(codes: Tensor) -> Tensor:
    """``packed_words`` of 4 bits, pairs 16 bits apart, as a GPU makes floats of two at once.

    Value (c, h, l) of a word is in bits 16 l + 4 (2 c + h) and up.

    Args:
        codes: [N, K] uint8.

    Returns:
        [N, 16 * blocks] int32.
    """
    by_pair = _by_pair(codes)
    halves = torch.zeros_like(by_pair[0])
    for i, code in enumerate(by_pair):
        halves |= code << 4 * i
    return _words_of(halves)


def _by_pair(codes: Tensor) -> tuple[Tensor, ...]:
    """Codes of each i = 2 c + h of ``packed_words``: [N, blocks, e, t, l] int16."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 128)).to(torch.int16)
    by_pair: tuple[Tensor, ...] = codes.unflatten(1, (-1, 4, 4, 4, 2)).unbind(3)
    return by_pair


def _words_of(halves: Tensor) -> Tensor:
    """Words [N, 16 * blocks] of halves [N, blocks, e, t, l], the low ones of l = 0."""
    words: Tensor = halves.transpose(2, 3).contiguous().flatten(1).view(torch.int32)
    return words


def e2m1_words(codes: Tensor) -> Tensor:
    """``packed_words`` of codes of e2m1, whose bits lie as a GPU makes bf16 of two at once.

    Features of l = 0 are in the low half of a word, those of l = 1 in the high one. Of i = 2 c + h
    below 3, bits 3 i to 3 i + 2 of the half are digit and exponent, bit 9 + 3 i is the sign, so
    that one shift moves both; of i = 3, bits 11, 13 and 14, and bit 10.

    Args:
        codes: [N, K] uint8.

    Returns:
        [N, 16 * blocks] int32.
    """
    by_pair = _by_pair(codes)
    halves = torch.zeros_like(by_pair[0])
    *first, last = by_pair
    for i, code in enumerate(first):
        halves |= (code & 7) << 3 * i | code >> 3 << 9 + 3 * i
    halves |= (last & 1) << 11 | (last & 6) << 12 | last >> 3 << 10
    return _words_of(halves)


def numbers(matrix: Int4Matrix) -> Tensor:
    """Values less their zeros, [N, K] int8, or numbers of e2m1, in fp32."""
    values = unpacked_int4(matrix.values, matrix.width)
    if matrix.zero is None:
        return torch.tensor(E2M1, dtype=torch.float32, device=values.device)[values.int()]
    return values.to(torch.int8) - matrix.zero.to(torch.int8).repeat_interleave(matrix.width, 1)


def elements(matrix: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The elements of a 4-bit matrix, times its factors, each rounded once: [N, K]."""
    found = numbers(matrix).float() * matrix.scale.float().repeat_interleave(matrix.width, 1)
    return (found if matrix.factor is None else found * matrix.factor[:, None]).to(dtype)


def expanded(matrix: IntegerMatrix) -> Tensor:
    """The elements: [N, K] fp32."""
    codes = matrix.codes.unflatten(1, (-1, matrix.width)).float()
    scale = matrix.scale.float()[:, :, None]
    elements: Tensor
    if matrix.minimum is None:
        elements = (codes - matrix.zero) * scale
    else:
        elements = codes * scale + matrix.minimum.float()[:, :, None]
    return elements.flatten(1)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``Weight`` of an ``Int4Matrix``."""

    matrix: Int4Matrix

    @property
    def out_features(self) -> int:
        """N."""
        return self.matrix.values.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return 2 * self.matrix.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales, and zeros or factors."""
        whole = self.matrix
        parts = (whole.values, whole.scale, whole.zero, whole.factor)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def num_expanded(self) -> int:
        """See ``ExpandedWeight``."""
        return self.out_features * self.in_features

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        factor, plain = self.matrix.factor, replace(self.matrix, factor=None)
        out = product_fp32(self.ordered(x), elements(plain, x.dtype))
        out = out if factor is None else out * factor
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

    def cut(self, token_ids: Tensor) -> Int4Weight:
        """See ``CutWeight``."""
        whole = self.matrix
        names = ("values", "scale", "zero", "factor")
        parts = {name: part for name in names if (part := getattr(whole, name)) is not None}
        cut = {name: part[token_ids] for name, part in parts.items()}
        return Int4Weight(replace(whole, **cut))

    def ordered(self, x: Tensor) -> Tensor:
        """Activations in the order of the columns."""
        return x if self.matrix.order is None else x[:, self.matrix.order]

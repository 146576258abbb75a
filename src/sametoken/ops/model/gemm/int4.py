"""Products with 4-bit weights in plain PyTorch: integers by group, scales applied to sums.

A difference of value and zero is a small integer, exact in every dtype of activations, so a group's
sum needs no rounded weight (docs/decisions/0029-products-of-quantized-weights.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.fp8 import scaled_product
from sametoken.ops.model.gemm.reference import product_fp32
from sametoken.ops.weight import Int4Matrix, IntegerMatrix


def packed_int4(values: Tensor, width: int) -> Tensor:
    """[N, K] uint8 below 16 to the bytes of ``Int4Matrix``, [N, K / 2]."""
    low, high = values.unflatten(1, (-1, 2, width // 2)).unbind(2)
    packed: Tensor = low | high << 4
    return packed.flatten(1)


def unpacked_int4(packed: Tensor, width: int) -> Tensor:
    """The inverse of ``packed_int4``."""
    bytes_by_group = packed.unflatten(1, (-1, width // 2))
    return torch.cat((bytes_by_group & 15, bytes_by_group >> 4), dim=2).flatten(1)


def integers(matrix: Int4Matrix, group: int) -> Tensor:
    """A group's values less their zeros: [N, width] int8."""
    half = matrix.width // 2
    values = unpacked_int4(matrix.values[:, group * half : (group + 1) * half], matrix.width)
    return values.to(torch.int8) - matrix.zero[:, group, None].to(torch.int8)


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
        """Bytes of values, scales and zeros."""
        return self.matrix.values.nbytes + self.matrix.scale.nbytes + self.matrix.zero.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        out = scaled_product(
            self.ordered(x), None, self.matrix.scale, self.matrix.width, self._sums
        )
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

    def ordered(self, x: Tensor) -> Tensor:
        """Activations in the order of the columns."""
        return x if self.matrix.order is None else x[:, self.matrix.order]

    def _sums(self, values: Tensor, index: int) -> Tensor:
        return product_fp32(values, integers(self.matrix, index))

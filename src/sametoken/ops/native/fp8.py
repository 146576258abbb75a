"""fp8 products by the C kernels: values widened once, scales applied to the sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.fp8 import group_width, scaled_product
from sametoken.ops.weight import Fp8Matrix, Rounding, Weight


@dataclass(frozen=True, slots=True)
class WidenedFp8Weight:
    """``Weight`` of float8 values, each exact in the dtype of the products; scales stay outside.

    It takes as much memory as an unquantized matrix, and as much time.

    Attributes:
        groups: the values by group of features that shares scales, in order.
        scale, rounding: as in ``Fp8Matrix``.
        dtype: of the values, and of what they are multiplied with.
    """

    groups: tuple[Weight, ...]
    scale: Tensor
    rounding: Rounding | None
    dtype: torch.dtype

    @classmethod
    def packed(
        cls, matrix: Fp8Matrix, dtype: torch.dtype, pack: Callable[[Tensor], Weight]
    ) -> WidenedFp8Weight:
        """Take over a matrix, for activations of ``dtype``; ``pack`` makes a weight of a group."""
        values, scale, rounding = matrix.values, matrix.scale, matrix.rounding
        # Both operands are float8, or one is and the other has the model's dtype.
        wide = dtype if rounding is None else torch.bfloat16
        width = group_width(values.shape[1], scale, rounding)
        groups = (pack(group.to(wide)) for group in values.split(width, dim=1))
        return cls(tuple(groups), scale, rounding, wide)

    @property
    def out_features(self) -> int:
        """N."""
        return self.groups[0].out_features

    @property
    def in_features(self) -> int:
        """K."""
        return sum(group.in_features for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the values and the scales."""
        return sum(group.nbytes for group in self.groups) + self.scale.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        out = scaled_product(x, self.scale, self.rounding, self._sums)
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

    def _sums(self, values: Tensor, index: int) -> Tensor:
        values = values.to(self.dtype).contiguous()
        return self.groups[index].matmul(values, out_dtype=torch.float32)

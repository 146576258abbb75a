"""Products of quantized weights by the C kernels: values widened once, scales applied to sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.fp8 import group_width, rounded_by, scaled_product
from sametoken.ops.model.gemm.int4 import integers
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, Rounding, Weight

Pack = Callable[[Tensor], Weight]


@dataclass(frozen=True, slots=True)
class WidenedWeight:
    """``Weight`` of float8 values or small integers, each exact in the dtype of the products.

    It takes as much memory as an unquantized matrix.

    Attributes:
        groups: the values by group of features that shares scales, in order.
        scale: of the weight: [N] or [N, groups].
        dtype: of the values, and of what they are multiplied with.
        rounding: of activations to float8; None: none.
        order: as in ``Int4Matrix``.
    """

    groups: tuple[Weight, ...]
    scale: Tensor
    dtype: torch.dtype
    rounding: Rounding | None = None
    order: Tensor | None = None

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
        given = x if self.order is None else x[:, self.order]
        values, x_scale = (given, None) if self.rounding is None else rounded_by(self.rounding, x)
        width = self.groups[0].in_features
        out = scaled_product(values, x_scale, self.scale, width, self._sums)
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

    def _sums(self, values: Tensor, index: int) -> Tensor:
        values = values.to(self.dtype).contiguous()
        return self.groups[index].matmul(values, out_dtype=torch.float32)


def widened_fp8(matrix: Fp8Matrix, dtype: torch.dtype, pack: Pack) -> WidenedWeight:
    """Take over a matrix, for activations of ``dtype``; ``pack`` makes a weight of a group."""
    values, scale, rounding = matrix.values, matrix.scale, matrix.rounding
    # Both operands are float8, or one is and the other has the model's dtype.
    wide = dtype if rounding is None else torch.bfloat16
    width = group_width(values.shape[1], scale, rounding)
    groups = tuple(pack(group.to(wide)) for group in values.split(width, dim=1))
    return WidenedWeight(groups, scale, wide, rounding)


def widened_int4(matrix: Int4Matrix, dtype: torch.dtype, pack: Pack) -> WidenedWeight:
    """As ``widened_fp8``."""
    groups = range(matrix.scale.shape[1])
    packed = tuple(pack(integers(matrix, index).to(dtype)) for index in groups)
    return WidenedWeight(packed, matrix.scale, dtype, order=matrix.order)

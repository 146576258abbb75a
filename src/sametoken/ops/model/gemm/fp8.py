"""fp8 products in plain PyTorch: rounding of both operands, and the product.

Weights are float8 e4m3 with a scale per row, or per row and 128 features. Activations are rounded
row by row to the same format before the product, as the checkpoint's scheme says, or stay as they
are (docs/decisions/0029-products-of-quantized-weights.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.reference import MatrixWeight, product_fp32
from sametoken.ops.weight import BY_ROW, RoundedRows, Rounding

#: The largest number of e4m3.
LARGEST = torch.finfo(torch.float8_e4m3fn).max

#: Scale per unit of a row's largest element, which becomes the largest number of e4m3.
STEP = 1 / LARGEST

#: Lower bound of a row's largest element, so that no scale is 0.
TINY = 2.0**-100

#: Bits of the mantissa and of the exponent of an fp32 number.
MANTISSA, EXPONENT = 0x007FFFFF, 0x7F800000

#: Features that share a scale, where scales are not those of whole rows.
GROUP = 128

_SLICE_ELEMENTS = 1 << 24


def rounded(x: Tensor, powers: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize [T, K] of any floating dtype to float8 e4m3 [T, K] and a scale per row, [T] fp32.

    Rounds to nearest even; a row's largest element becomes the largest number of e4m3, or less if
    scales are ``powers`` of two. Rows with NaN or an infinity have NaN.
    """
    values = x.float()
    scale = values.abs().amax(dim=1).clamp(min=TINY) * STEP
    if powers:
        scale = powers_from(scale)
    # A reciprocal is correctly rounded on every device; a division by a scalar need not be.
    return (values * scale.reciprocal()[:, None]).to(torch.float8_e4m3fn), scale


def powers_from(scale: Tensor) -> Tensor:
    """The least power of two that is not below each positive fp32 number, as UE8M0 holds it."""
    # Any bit of the mantissa carries into the exponent; then the mantissa is cleared.
    return ((scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)


def rounded_by(rounding: Rounding, x: Tensor) -> tuple[Tensor, Tensor]:
    """Round [T, K] as a scheme says: float8 e4m3 [T, K], and fp32 scales [T] or [T, groups].

    Under a fixed scale, elements beyond the largest number become it.
    """
    if rounding.scale is not None:
        scaled = x.float() * rounding.scale.reciprocal()
        values = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return values, rounding.scale.expand(x.shape[0])
    if not rounding.grouped:
        return rounded(x, rounding.powers)
    groups = [rounded(group, rounding.powers) for group in x.split(GROUP, dim=1)]
    return torch.cat([one for one, _ in groups], 1), torch.stack([scale for _, scale in groups], 1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``rounded`` for a weight [N, K] on its device, in slices of rows."""
    matrix = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        matrix[rows], scale[rows] = rounded(weight[rows])
    return matrix, scale


@dataclass(frozen=True, slots=True)
class Fp8Weight(MatrixWeight):
    """``Weight`` [N, K]: each element of ``matrix`` times the scale of its row or group.

    Attributes:
        matrix: [N, K] float8 e4m3, contiguous.
        scale: fp32, contiguous: [N], or [N, groups] by row and ``GROUP`` features.
        rounding: how activations become float8; None: they do not.
        blocks: see ``Fp8Matrix``.
    """

    scale: Tensor
    rounding: Rounding | None = BY_ROW
    blocks: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and its scales."""
        return self.matrix.nbytes + self.scale.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        values, x_scale = (x, None) if self.rounding is None else rounded_by(self.rounding, x)
        return self._product(values, x_scale, bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

    def matmul_rounded(self, rows: RoundedRows, bias: Tensor | None = None) -> Tensor:
        """See ``RoundingWeight``."""
        return self._product(rows.values, rows.scale, bias).to(rows.dtype)

    def gated_matmul_rounded(self, rows: RoundedRows) -> Tensor:
        """See ``RoundingWeight``."""
        return silu_mul(self.matmul_rounded(rows))

    def _product(self, values: Tensor, x_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        width = group_width(self.in_features, self.scale, self.rounding)

        def sums(values: Tensor, index: int) -> Tensor:
            return product_fp32(values, self.matrix[:, index * width : (index + 1) * width])

        out = scaled_product(values, x_scale, self.scale, width, sums)
        return out if bias is None else out + bias

    def cut(self, token_ids: Tensor) -> Self:
        """See ``CutWeight``."""
        matrix = self.matrix.view(torch.uint8)[token_ids].view(self.matrix.dtype)
        return replace(self, matrix=matrix, scale=self.scale[token_ids], blocks=False)


def group_width(in_features: int, scale: Tensor, rounding: Rounding | None) -> int:
    """Features that are summed before they are multiplied by scales."""
    grouped = scale.dim() == 2 or (rounding is not None and rounding.grouped)
    return GROUP if grouped else in_features


def scaled_product(
    x: Tensor,
    x_scale: Tensor | None,
    scale: Tensor,
    width: int,
    sums: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """[T, K] -> [T, N] fp32: sums by group, each multiplied by its scales, added in order.

    Args:
        x: [T, K].
        x_scale: fp32, of ``x``: [T] or [T, groups]; None: it has none.
        scale: of the weight: [N] or [N, groups].
        width: features of a group.
        sums: [T, width] and the index of a group to the group's products, [T, N] fp32.
    """
    total: Tensor | None = None
    for index, first in enumerate(range(0, x.shape[1], width)):
        factor = _of_group(scale, index).float()
        if x_scale is not None:
            factor = factor * _of_group(x_scale, index)[:, None]
        part = sums(x[:, first : first + width], index) * factor
        total = part if total is None else total + part
    assert total is not None
    return total


def _of_group(scale: Tensor, group: int) -> Tensor:
    """The scales of one group: those of [rows, groups], or [rows] for all groups."""
    return scale if scale.dim() == 1 else scale[:, group]

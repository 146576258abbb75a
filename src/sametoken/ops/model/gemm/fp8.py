"""fp8 products for draft heads in plain PyTorch: quantization of both operands, and the product.

Weights and activations are float8 e4m3 with a scale per row. Never used for the target's logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.reference import MatrixWeight, product_fp32

#: Scale per unit of a row's largest element, which becomes the largest number of e4m3.
STEP = 1 / torch.finfo(torch.float8_e4m3fn).max

#: Lower bound of a row's largest element, so that no scale is 0.
TINY = 2.0**-100

_SLICE_ELEMENTS = 1 << 24


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [T, K] of any floating dtype to float8 e4m3 [T, K] and a scale per row, [T] fp32.

    Rounds to nearest even; a row's largest element becomes the largest number of e4m3. Rows with
    NaN or an infinity have NaN.
    """
    values = x.float()
    scale = values.abs().amax(dim=1).clamp(min=TINY) * STEP
    # A reciprocal is correctly rounded on every device; a division by a scalar need not be.
    return (values * scale.reciprocal()[:, None]).to(torch.float8_e4m3fn), scale


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
    """``Weight`` [N, K] with the value ``matrix * scale[:, None]``.

    Attributes:
        matrix: [N, K] float8 e4m3, contiguous.
        scale: [N] fp32.
    """

    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and its scales."""
        return self.matrix.nbytes + self.scale.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        matrix, scale = rounded(x)
        out = product_fp32(matrix, self.matrix) * (self.scale * scale[:, None])
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.matmul(x))

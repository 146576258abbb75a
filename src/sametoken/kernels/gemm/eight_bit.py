"""Products in eight bits for draft heads: how both operands are made, and their product.

Weights and activations are float8 e4m3, each row with a scale of its own. Only drafts may
come of such products: no token of the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.gemm import reference
from sametoken.kernels.gemm.reference import PlainWeight

#: Of a row's largest element the scale, which makes it the largest number of e4m3.
STEP = 1 / torch.finfo(torch.float8_e4m3fn).max

#: What a row's largest element is taken for where it is less, so that no scale is 0.
TINY = 2.0**-100

_SLICE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    """A weight [N, K] that stands for ``matrix * scale[:, None]``.

    Attributes:
        matrix: [N, K] float8 e4m3, contiguous.
        scale: [N] fp32.
    """

    matrix: Tensor
    scale: Tensor

    @property
    def out_features(self) -> int:
        """N."""
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.matrix.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and its scales."""
        return self.matrix.nbytes + self.scale.nbytes


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] of any floating dtype as float8 e4m3 [T, K] and a scale a row, [T] fp32.

    To nearest, ties to even; a row's largest element becomes the largest that e4m3 holds.
    A row with NaN or an infinity has NaN.
    """
    values = x.float()
    scale = values.abs().amax(dim=1).clamp(min=TINY) * STEP
    # A reciprocal is one exact division on every device; dividing by a number need not be.
    return (values * scale.reciprocal()[:, None]).to(torch.float8_e4m3fn), scale


def quantize(weight: Tensor) -> EightBitWeight:
    """[N, K] of any floating dtype, rounded on its device, some rows at a time."""
    matrix = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        matrix[rows], scale[rows] = rounded(weight[rows])
    return EightBitWeight(matrix, scale)


def linear(x: Tensor, weight: EightBitWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T (+ bias)``, x rounded first: [T, K] -> [T, N] in x's dtype."""
    product = logits(x, weight)
    return (product if bias is None else product + bias).to(x.dtype)


def logits(x: Tensor, weight: EightBitWeight) -> Tensor:
    """``x @ weight.T``, x rounded first: [L, K] -> [L, V] fp32."""
    matrix, scale = rounded(x)
    product = reference.logits(matrix, PlainWeight(weight.matrix))
    return product * (weight.scale * scale[:, None])

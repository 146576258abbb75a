"""Weights in eight bits for the logits of drafts: how they are made, and their product.

A weight is float8 e4m3 with one scale per output feature. Activations come of an RMS norm:
they are rounded to e4m3 as they are. Only drafts may come of such products: no token of
the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.gemm import reference
from sametoken.kernels.gemm.reference import PlainWeight

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
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


def rounded(x: Tensor) -> Tensor:
    """The nearest float8 e4m3 of each element, ties to even; beyond its range the largest.

    NaN stays NaN.
    """
    return x.float().clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def quantize(weight: Tensor) -> EightBitWeight:
    """[N, K] of any floating dtype, rounded to nearest on its device, some rows at a time.

    The largest element of a row becomes the largest that e4m3 holds.
    """
    matrix = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, _SLICE_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        values = weight[rows].float()
        largest = values.abs().amax(dim=1)
        scale[rows] = torch.where(largest > 0, largest / _LARGEST, 1.0)
        matrix[rows] = rounded(values / scale[rows, None])
    return EightBitWeight(matrix, scale)


def logits(x: Tensor, weight: EightBitWeight) -> Tensor:
    """``rounded(x) @ weight.T``: [L, K] -> [L, V] fp32."""
    return reference.logits(rounded(x), PlainWeight(weight.matrix)) * weight.scale

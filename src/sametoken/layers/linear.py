"""Projections with an optional bias: whole, or split over ranks along their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sametoken.layers.parallel import TensorParallel
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import Weight


class Projection(Protocol):
    """[T, in_features] -> [T, out_features] in the dtype of the input."""

    @property
    def weight(self) -> Weight:
        """What of the weight is on this rank."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias on this rank."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T (+ bias)``: [T, in_features] -> [T, out_features].

    Of a weight that is split over ranks along its output, this rank's part.
    """

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.weight.matmul(x, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """``x @ weight.T (+ bias)`` of a weight that is split over ranks along its input.

    The ranks' partial products travel in fp32 and are added in rank order, rounded once:
    every rank gets the same bits, and a row's do not depend on the number of rows.

    Attributes:
        weight: [out_features, in_features / size], this rank's columns.
        bias: the whole bias, added after all partial products.
    """

    kernels: Kernels
    parallel: TensorParallel
    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features / size], this rank's, to the whole [T, out_features]."""
        partial = self.weight.matmul(x, out_dtype=torch.float32)
        return self.kernels.partial_sum(self.parallel.gather(partial), x.dtype, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

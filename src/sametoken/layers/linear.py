"""A projection with an optional bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.interface import Kernels, PackedWeight


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T (+ bias)``: [T, in_features] -> [T, out_features]."""

    kernels: Kernels
    weight: PackedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.kernels.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

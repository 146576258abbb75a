"""RMS norm, alone or fused with the residual add."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.ops.backend import Kernels
from sametoken.ops.weight import RoundedRows, Rounding


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` per row; ``weight`` is [hidden]."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; may reuse the memory of both."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class RoundingNorm:
    """``RMSNorm`` that one product reads, which gets its rows rounded as it would round them."""

    kernels: Kernels
    weight: Tensor
    eps: float
    rounding: Rounding

    def __call__(self, x: Tensor) -> RoundedRows:
        """[T, hidden] -> [T, hidden]."""
        return self.kernels.rounding_rms_norm(x, None, self.weight, self.eps, self.rounding)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[RoundedRows, Tensor]:
        """As ``RMSNorm.add``."""
        return self.kernels.rounding_rms_norm(x, residual, self.weight, self.eps, self.rounding)

"""Weights of different formats as one, for a fused projection whose parts are stored unlike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """``Weight`` with the rows of all parts, each with its own product.

    Attributes:
        parts: weights of equal in_features.
        silu_mul: [T, 2I] to [T, I], as in ``Weight.gated_matmul``.
    """

    parts: tuple[Weight, ...]
    silu_mul: Callable[[Tensor], Tensor]

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        """Columns of each part."""
        return self.parts[0].in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        products = (
            part.matmul(x, own, out_dtype) for part, own in zip(self.parts, biases, strict=True)
        )
        return torch.cat(list(products), dim=1)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return self.silu_mul(self.matmul(x))

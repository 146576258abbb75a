"""Weights: a matrix owns its products, whatever the format and the device it is kept for."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """A matrix in the layout that its products want, and those products.

    Holds the only copy; ``out_features`` is N and ``in_features`` is K of the checkpoint's
    [N, K] matrix.
    """

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """``x @ weight.T (+ bias)``, rounded once: [T, K] -> [T, N] in x's dtype.

        With ``out_dtype`` torch.float32, and then without a bias, the sums as they are: of
        logits, and of products that are added to others.
        """
        ...

    def gated_matmul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of [T, 2I] = [gate | up] = ``matmul(x)`` -> [T, I].

        Gate and up are rounded to x's dtype before the product.
        """
        ...


class UnquantizedWeight(Weight, Protocol):
    """A weight in the model's dtype, whose rows can be read."""

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding's: [T] int64 -> [T, K]."""
        ...

    def quantize_fp8(self) -> Weight:
        """A copy in fp8, for draft heads only: never for the target's logits.

        Its products round activations likewise.

        Raises:
            UnsupportedError: there are no such products here.
        """
        ...


class Experts(Protocol):
    """MLPs of which each row runs some, in the layout that their products want."""

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Weighted sum of ``down.matmul(gate_up.gated_matmul(x))`` of each row's experts.

        Added in fp32, in an order that the row alone decides, and rounded once: [T, H] ->
        [T, H] in x's dtype. With ``out_dtype`` torch.float32 nothing is rounded after the gated
        products, so that parts of every expert's inner features can be added first.
        ``chosen`` and ``weights`` as ``Kernels.moe_gate`` gives them.
        """
        ...

"""Weight protocols: a matrix owns its products, whatever its format and device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """A matrix in the layout of its products, and those products.

    Holds the only copy of the checkpoint's [N, K] matrix; ``out_features`` is N, ``in_features`` K.
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

        With ``out_dtype`` torch.float32 and no bias, returns unrounded sums: for logits, and for
        products that are added to others.
        """
        ...

    def gated_matmul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` with [gate | up] = ``matmul(x)`` [T, 2I]: [T, K] -> [T, I].

        Gate and up are rounded to x's dtype before the product.
        """
        ...


class UnquantizedWeight(Weight, Protocol):
    """A weight in the model's dtype, with embedding lookup."""

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the matrix: [T] int64 -> [T, K]."""
        ...

    def quantize_fp8(self) -> Weight:
        """An fp8 copy whose products round activations too; never for the target's logits.

        Draft heads only.

        Raises:
            UnsupportedError: this backend has no fp8 products.
        """
        ...


class Experts(Protocol):
    """The experts of a mixture-of-experts layer, in the layout of their products."""

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Weighted sum of ``down.matmul(gate_up.gated_matmul(x))`` over each row's experts.

        Without gates, of ``down.matmul(relu_squared(up.matmul(x)))``.

        Added in fp32, in an order that depends on the row only, and rounded once: [T, H] ->
        [T, H] in x's dtype. With ``out_dtype`` torch.float32 nothing is rounded after the gated
        products, so that tensor-parallel partial sums can be added first. ``chosen`` and
        ``weights`` come from ``Kernels.moe_gate``.
        """
        ...

"""Start-up self-check of quantized products: their kernels give a row the same bits on this chip.

Tiles differ with the number of rows, and many rows by 4 bits have kernels of another kind. They
give the same bits where tensor cores add an instruction's products in one way for all shapes of
instructions: seen on Hopper, and promised by no chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.selfcheck import require_row_law

#: Shape [N, K], number of dimensions of the scales, and how activations are rounded.
_Form = tuple[int, int, int, tuple[bool, bool] | None]


class _Products(Protocol):
    """The part of ``Weight`` that is compared."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...

    def gated_matmul(self, x: Tensor) -> Tensor: ...


class Fp8Check:
    """The float8 weights in use, one per form."""

    def __init__(self) -> None:
        self._weights: WeakValueDictionary[_Form, Fp8DeviceWeight] = WeakValueDictionary()

    def watch(self, weight: Fp8DeviceWeight) -> Fp8DeviceWeight:
        """Let ``prove`` check weights of this form while one is in use; the weight."""
        self._weights.setdefault(_form(weight), weight)
        return weight

    def prove(self, row_counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """See ``prove_products``; the number of forms."""
        weights = list(self._weights.values())
        prove_products("float8", weights, row_counts, dtype, device)
        return len(weights)


def prove_products(
    kind: str,
    weights: Sequence[_Products],
    row_counts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare the products of every weight at row counts with those of few rows.

    Products before a gate are compared of weights whose half fits the input of another.

    Args:
        kind: of the weights, for messages.
        weights: all on ``device``.
        row_counts: as for ``require_row_law``.
        dtype: of activations.
        device: where products run.

    Raises:
        UnsupportedError: bits differ.
    """
    depths = {weight.in_features for weight in weights}
    for weight in weights:
        generator = torch.Generator(device).manual_seed(0)
        shape = (max(row_counts), weight.in_features)
        x = torch.randn(shape, device=device, generator=generator).to(dtype)
        what = f"{kind} products of [{weight.out_features}, {weight.in_features}]"
        require_row_law(what, partial(_sums, weight, x), row_counts)
        if weight.out_features in {2 * depth for depth in depths}:
            require_row_law(f"gated {what}", partial(_gated, weight, x), row_counts)


def _form(weight: Fp8DeviceWeight) -> _Form:
    how = weight.rounding
    rounding = None if how is None else (how.grouped, how.scale is None)
    return weight.out_features, weight.in_features, weight.scale.dim(), rounding


def _sums(weight: _Products, x: Tensor, rows: slice) -> Tensor:
    return weight.matmul(x[rows], out_dtype=torch.float32)


def _gated(weight: _Products, x: Tensor, rows: slice) -> Tensor:
    return weight.gated_matmul(x[rows])

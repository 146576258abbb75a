"""Start-up self-check of quantized products and of experts: a row has the same bits on this chip.

Tiles differ with the number of rows, and many rows by 4 bits have kernels of another kind. They
give the same bits where tensor cores add an instruction's products in one way for all shapes of
instructions: seen on Hopper, and promised by no chip.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.model.gemm.selfcheck import compared_counts, normal, require_row_law
from sametoken.ops.model.moe_selfcheck import prove_experts
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts

_Checked = Fp8DeviceWeight | Int4DeviceWeight | StackedExperts
_Kind = TypeVar("_Kind", Fp8DeviceWeight, Int4DeviceWeight, StackedExperts)


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


class QuantizedCheck:
    """Knows the quantized weights and all experts that are in use, and proves one of each form."""

    def __init__(self) -> None:
        # By identity, as weights of one form may be dropped one by one.
        self._in_use: WeakValueDictionary[int, _Checked] = WeakValueDictionary()

    def watch(self, weight: _Kind) -> _Kind:
        """Count a weight, or a layer's experts, while they are in use; these."""
        self._in_use[id(weight)] = weight
        return weight

    def four_bit_matrices(self) -> list[Int4Panels]:
        """One matrix of each shape [N, K] in 4 bits that cuBLAS may multiply: without factors."""
        found = [one.panels for one in self._of(Int4DeviceWeight)]
        plain = [one for one in found if one.factors is None]
        return list({(one.out_features, one.in_features): one for one in plain}.values())

    def prove(self, row_counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """See ``prove_products`` and ``prove_experts``; the number of forms."""
        packed, float8 = self._of(Int4DeviceWeight), self._of(Fp8DeviceWeight)
        experts = self._of(StackedExperts)
        prove_products("4-bit", packed, row_counts, dtype, device)
        prove_products("float8", float8, row_counts, dtype, device)
        for one in experts:
            prove_experts(one, row_counts, dtype, device)
        return len(packed) + len(float8) + len(experts)

    def _of(self, kind: type[_Kind]) -> list[_Kind]:
        """One of each form."""
        found = [one for one in self._in_use.values() if isinstance(one, kind)]
        return list({_form(one): one for one in found}.values())


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
        counts = compared_counts(row_counts, weight.out_features)
        x = normal(generator, (max(counts), weight.in_features), dtype)
        what = f"{kind} products of [{weight.out_features}, {weight.in_features}]"
        require_row_law(what, partial(_sums, weight, x), counts)
        if weight.out_features in {2 * depth for depth in depths}:
            require_row_law(f"gated {what}", partial(_gated, weight, x), counts)


def _form(one: _Checked | ExpertStack | Int4Panels) -> tuple[Hashable, ...]:
    """What the kernels of a weight, or of experts, depend on."""
    if isinstance(one, StackedExperts):
        return *_form(one.gate_up), *_form(one.down), type(one.form).__name__
    if isinstance(one, Int4DeviceWeight):
        return _form(one.panels)
    if isinstance(one, Int4Panels):
        return one.words.shape, one.in_features, one.form, one.offsets is None
    rounding = one.rounding and (*one.rounding.form, one.rounding.scale is None)
    if isinstance(one, ExpertStack):
        return one.weight.shape, one.weight.dtype, _dim(one.scales), rounding, one.blocks
    return one.matrix.shape, _dim(one.scale), rounding, one.blocks


def _dim(scales: Tensor | None) -> int:
    return 0 if scales is None else scales.dim()


def _sums(weight: _Products, x: Tensor, rows: slice) -> Tensor:
    return weight.matmul(x[rows], out_dtype=torch.float32)


def _gated(weight: _Products, x: Tensor, rows: slice) -> Tensor:
    return weight.gated_matmul(x[rows])

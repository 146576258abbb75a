"""Linear projections with an optional bias, whole or row-parallel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from sametoken.layers.parallel import TensorParallel
from sametoken.layers.share import Part
from sametoken.layers.slices import in_slices
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import Normed, RoundedRows, RoundingWeight, Weight


class Projection(Protocol):
    """[T, in_features] -> [T, out_features] in the dtype of the input."""

    @property
    def weight(self) -> Weight:
        """This rank's part of the weight."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The modules of a checkpoint whose matrices are the weight; (): it is of no checkpoint."""
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

    Column-parallel if the weight is this rank's part of the output features.

    Attributes:
        parts: see ``Projection``.
    """

    weight: Weight
    bias: Tensor | None = None
    parts: tuple[Part, ...] = ()

    def __call__(self, x: Normed) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return in_slices(self._product, x)

    def gated(self, x: Normed) -> Tensor:
        """``Weight.gated_matmul``, without bias: [T, in_features] -> [T, out_features / 2]."""
        if isinstance(x, RoundedRows):
            return self._rounding.gated_matmul_rounded(x)
        return self.weight.gated_matmul(x)

    def _product(self, x: Normed) -> Tensor:
        if isinstance(x, RoundedRows):
            return self._rounding.matmul_rounded(x, self.bias)
        return self.weight.matmul(x, self.bias)

    @property
    def _rounding(self) -> RoundingWeight:
        # A norm rounds for such a weight alone; isinstance would look at all members of a protocol.
        return cast("RoundingWeight", self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class ScaledLinear(Linear):
    """``Linear`` with factors on its outputs and its input, as muP trains it; each rounds.

    Attributes:
        factors: [out_features] fp32.
        before: the input's.
    """

    kernels: Kernels = field(kw_only=True)
    factors: Tensor = field(kw_only=True)
    before: float = field(kw_only=True, default=1.0)

    def gated(self, x: Normed) -> Tensor:
        """``silu(gate) * up`` of the scaled outputs [gate | up]; shapes as in ``Linear``."""
        return self.kernels.silu_mul(self(x))

    def _product(self, x: Normed) -> Tensor:
        assert isinstance(x, Tensor)
        scaled = x if self.before == 1.0 else x * self.before
        # In place: a copy in fp32 would be the largest tensor of an MLP.
        return self.weight.matmul(scaled, self.bias).mul_(self.factors)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """Row-parallel ``x @ weight.T (+ bias)``: the input features are divided among ranks.

    The fp32 partial products are gathered, added in rank order and rounded once: every rank gets
    the same bits, and a row's bits do not depend on the number of rows.

    Attributes:
        weight: [out_features, in_features / size], this rank's columns.
        bias: the whole bias, added after all partial products.
        parts: see ``Projection``.
    """

    kernels: Kernels
    parallel: TensorParallel
    weight: Weight
    bias: Tensor | None = None
    parts: tuple[Part, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's [T, in_features / size] to the whole [T, out_features]."""
        return in_slices(self._product, x)

    def _product(self, x: Tensor) -> Tensor:
        partial = self.weight.matmul(x, out_dtype=torch.float32)
        return self.parallel.sum(self.kernels, partial, x.dtype, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

"""The gated feed-forward block.

The sparse mixture of experts, with an expert that serves every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.parallel import TensorParallel
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import Experts


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into [gate | up], without biases."""

    gate_up: Linear
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up.weight.gated_matmul(x))

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """Every expert, its inner features divided among ranks.

    A rank sums its part of a row's experts in fp32; those sums travel and are added in rank
    order, rounded once, as ``RowParallelLinear`` does it.
    """

    kernels: Kernels
    parallel: TensorParallel
    experts: Experts

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden] in the dtype of ``x``, the same bits on every rank."""
        part = self.experts(x, chosen, weights, torch.float32)
        return self.kernels.partial_sum(self.parallel.gather(part), x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part of all experts."""
        return self.experts.nbytes


@dataclass(frozen=True, slots=True)
class SparseMoE:
    """A router's choice of experts per row, their weighted sum, and a gated shared expert.

    Attributes:
        router: projection to one logit per expert, whole on every rank.
        experts: MLPs of which each row runs some, all of every one or this rank's part.
        top_k: experts per row.
        normalise: whether the weights of a row's experts are divided by their sum.
        shared: the expert of every row.
        shared_gate: projection to the logit of the shared expert's gate, whole on every rank.
    """

    kernels: Kernels
    router: Linear
    experts: Experts | DividedExperts
    top_k: int
    normalise: bool
    shared: GatedMLP
    shared_gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        shared = self.shared(x)
        gate = self.shared_gate(x).expand_as(shared).contiguous()
        chosen, weights = self.kernels.moe_gate(self.router(x), self.top_k, self.normalise)
        return self.experts(x, chosen, weights) + self.kernels.sigmoid_mul(shared, gate)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts and of the router."""
        mlps = self.experts.nbytes + self.shared.nbytes
        return mlps + self.router.nbytes + self.shared_gate.nbytes

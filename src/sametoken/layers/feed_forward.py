"""Feed-forward blocks: the gated MLP, and the sparse mixture of experts with a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.slices import in_slices
from sametoken.ops.backend import Kernels, Routing
from sametoken.ops.weight import Experts


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into [gate | up], without biases."""

    gate_up: Linear
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(lambda rows: self.down(self.gate_up.weight.gated_matmul(rows)), x)

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """All experts, with their inner features divided among ranks.

    A rank sums its part of a row's experts in fp32; the partial sums are gathered, added in rank
    order and rounded once, as in ``RowParallelLinear``.
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
    """MoE: the router's top-k experts per row, weighted, plus a gated shared expert.

    Attributes:
        router: projection to one logit per expert, whole on every rank.
        experts: the experts, whole or this rank's part of each.
        routing: how the router's logits choose experts and their weights.
        shared: the shared expert, which runs for every row.
        shared_gate: projection to the logit of the shared expert's gate, whole on every rank.
    """

    kernels: Kernels
    router: Linear
    experts: Experts | DividedExperts
    routing: Routing
    shared: GatedMLP
    shared_gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(self._mixture, x)

    def _mixture(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        gate = self.shared_gate(x).expand_as(shared).contiguous()
        chosen, weights = self.kernels.moe_gate(self.router(x), self.routing)
        return self.experts(x, chosen, weights) + self.kernels.sigmoid_mul(shared, gate)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, the router and the shared gate."""
        mlps = self.experts.nbytes + self.shared.nbytes
        return mlps + self.router.nbytes + self.shared_gate.nbytes

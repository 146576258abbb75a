"""Feed-forward blocks: the gated MLP, routed experts, and both together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.residual import Matrices
from sametoken.layers.share import ExpertModules, Part
from sametoken.layers.slices import in_slices
from sametoken.ops.backend import Kernels, Routing
from sametoken.ops.weight import Experts, Normed, Weight


@dataclass(frozen=True, slots=True)
class GatedMLP(Matrices):
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into [gate | up], without biases."""

    gate_up: Linear
    down: Projection

    def __call__(self, x: Normed) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(lambda rows: self.down(self.gate_up.gated(rows)), x)


@dataclass(frozen=True, slots=True)
class GeluMLP(Matrices):
    """``down(gelu(gate(x)) * up(x))``, with gelu approximated by tanh, without biases."""

    kernels: Kernels
    gate_up: Linear
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(lambda rows: self.down(self.kernels.gelu_mul(self.gate_up(rows))), x)


@dataclass(frozen=True, slots=True)
class WholeExperts(Matrices):
    """All experts, whole.

    Attributes:
        modules: those of the checkpoint.
    """

    experts: Experts
    modules: ExpertModules

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, *, beside: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden] in the dtype of ``x``."""
        return self.experts(x, chosen, weights, beside=beside)


@dataclass(frozen=True, slots=True)
class DividedExperts(Matrices):
    """All experts, with their inner features divided among ranks.

    A rank sums its part of a row's experts in fp32; the partial sums are gathered, added in rank
    order and rounded once, as in ``RowParallelLinear``.

    Attributes:
        modules: those of the checkpoint.
    """

    kernels: Kernels
    parallel: TensorParallel
    experts: Experts
    modules: ExpertModules

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, *, beside: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden] in the dtype of ``x``, the same bits on every rank."""
        part = self.experts(x, chosen, weights, torch.float32)
        out = self.parallel.sum(self.kernels, part, x.dtype)
        return out if beside is None else out + beside


#: The experts of a layer on a rank.
LayerExperts = WholeExperts | DividedExperts


@dataclass(frozen=True, slots=True)
class PreciseRouter(Matrices):
    """A router whose logits stay in fp32, unrounded: [T, hidden] -> [T, experts].

    Attributes:
        parts: see ``Projection``.
    """

    weight: Weight
    parts: tuple[Part, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, experts] fp32."""
        return self.weight.matmul(x, out_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class RoutedExperts(Matrices):
    """The router's top-k experts per row, weighted.

    Attributes:
        router: projection to one logit per expert, whole on every rank.
        experts: the experts, whole or this rank's part of each.
        routing: how the router's logits choose experts and their weights.
        bias: [E] fp32, added to the scores that choose, not to the weights; None: nothing.
    """

    kernels: Kernels
    router: Linear | PreciseRouter
    experts: LayerExperts
    routing: Routing
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(self.mixture, x)

    def mixture(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """Of the rows of one slice; ``beside`` is as in ``Experts``."""
        chosen, weights = self.kernels.moe_gate(self.router(x), self.routing, self.bias)
        return self.experts(x, chosen, weights, beside=beside)


@dataclass(frozen=True, slots=True)
class GatedExpert(Matrices):
    """A shared expert with a sigmoid gate of one logit per row.

    Attributes:
        gate: projection to the logit, whole on every rank.
    """

    kernels: Kernels
    mlp: GatedMLP
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        out = self.mlp(x)
        return self.kernels.sigmoid_mul(out, self.gate(x).expand_as(out))


@dataclass(frozen=True, slots=True)
class SparseMoE(Matrices):
    """MoE: routed experts, plus a shared expert that runs for every row."""

    routed: RoutedExperts
    shared: GatedExpert | GatedMLP

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(lambda rows: self.routed.mixture(rows, self.shared(rows)), x)


@dataclass(frozen=True, slots=True)
class ExpertsBeside(Matrices):
    """Routed experts beside an MLP, both of the residual stream, each with norms of its own.

    Attributes:
        router_norm: the router's, with its scales as weight.
        router: projection to one logit per expert, whole on every rank.
        expert_scales: [E] fp32, factors on the experts' weights.
    """

    kernels: Kernels
    router_norm: RMSNorm
    router: Linear
    routing: Routing
    expert_scales: Tensor
    input_norm: RMSNorm
    experts: LayerExperts
    output_norm: RMSNorm

    def __call__(self, residual: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(self._mixture, residual)

    def _mixture(self, residual: Tensor) -> Tensor:
        logits = self.router(self.router_norm(residual)).float()
        chosen, weights = self.kernels.moe_gate(logits, self.routing)
        weights = weights * self.expert_scales[chosen]
        return self.output_norm(self.experts(self.input_norm(residual), chosen, weights))

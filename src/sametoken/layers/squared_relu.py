"""Feed-forward blocks without gates: the squared-ReLU MLP, and a mixture of such experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.layers.feed_forward import LayerExperts, PreciseRouter
from sametoken.layers.linear import Linear, Projection
from sametoken.layers.residual import Matrices
from sametoken.layers.slices import in_slices
from sametoken.ops.backend import Kernels, Routing


@dataclass(frozen=True, slots=True)
class SquaredReluMLP(Matrices):
    """``down(relu(up(x))^2)``, without biases."""

    kernels: Kernels
    up: Linear
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(lambda rows: self.down(self.kernels.relu_squared(self.up(rows))), x)


@dataclass(frozen=True, slots=True)
class LatentSpace(Matrices):
    """Projections into and out of the narrower space of experts, whole on every rank."""

    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class SquaredReluMoE(Matrices):
    """MoE of ungated experts, in a latent space or not, plus a shared expert of full width.

    Attributes:
        router: projection to one logit per expert, whole on every rank.
        correction: [E] fp32, added to the scores by which experts are chosen.
        routing: how the logits choose experts and their weights, the routed scale included.
        experts: the experts, whole or this rank's part of each.
        latent: the space of the experts; None: that of the rows.
        shared: the shared expert, which runs for every row.
    """

    kernels: Kernels
    router: PreciseRouter
    correction: Tensor
    routing: Routing
    experts: LayerExperts
    latent: LatentSpace | None
    shared: SquaredReluMLP

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return in_slices(self._mixture, x)

    def _mixture(self, x: Tensor) -> Tensor:
        chosen, weights = self.kernels.moe_gate(self.router(x), self.routing, self.correction)
        shared = self.shared(x)
        if self.latent is None:
            return self.experts(x, chosen, weights, beside=shared)
        return self.latent.up(self.experts(self.latent.down(x), chosen, weights)) + shared

"""The sparse mixture of experts, with an expert that serves every row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.kernels.interface import Kernels, PackedExperts
from sametoken.layers.linear import Linear
from sametoken.layers.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class SparseMoE:
    """A router's choice of experts per row, their weighted sum, and a gated shared expert.

    Attributes:
        router: projection to one logit per expert.
        experts: MLPs of which each row runs some.
        top_k: experts per row.
        normalise: whether the weights of a row's experts are divided by their sum.
        shared: the expert of every row.
        shared_gate: projection to the logit of the shared expert's gate.
    """

    kernels: Kernels
    router: Linear
    experts: PackedExperts
    top_k: int
    normalise: bool
    shared: GatedMLP
    shared_gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        shared = self.shared(x)
        gate = self.shared_gate(x).expand_as(shared).contiguous()
        return self._routed(x) + self.kernels.sigmoid_mul(shared, gate)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts and of the router."""
        mlps = self.experts.nbytes + self.shared.nbytes
        return mlps + self.router.nbytes + self.shared_gate.nbytes

    def _routed(self, x: Tensor) -> Tensor:
        """The weighted sum of every row's experts."""
        chosen, weights = self.kernels.route(self.router(x), self.top_k, self.normalise)
        return self.kernels.mix_experts(x, self.experts, chosen, weights)

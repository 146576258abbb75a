"""The sparse mixture of experts, with an expert that serves every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.interface import Kernels
from sametoken.layers.linear import Linear
from sametoken.layers.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class SparseMoE:
    """A router's choice of experts per row, their weighted sum, and a gated shared expert.

    Attributes:
        router: projection to one logit per expert.
        top_k: experts per row.
        normalise: whether the weights of a row's experts are divided by their sum.
        shared: the expert of every row.
        shared_gate: projection to the logit of the shared expert's gate.
    """

    kernels: Kernels
    router: Linear
    experts: tuple[GatedMLP, ...]
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
        mlps = sum(mlp.nbytes for mlp in (*self.experts, self.shared))
        return mlps + self.router.nbytes + self.shared_gate.nbytes

    def _routed(self, x: Tensor) -> Tensor:
        """The weighted sum of every row's experts, added in the order of their ids, in fp32."""
        chosen, weights = self._route(x)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            out[rows] += self.experts[expert](x[rows]).float() * weights[rows, places, None]
        return out.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, top_k] expert ids and fp32 weights; of equal probabilities the lowest id wins."""
        probabilities = self.router(x).float().softmax(dim=-1)
        weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, chosen = weights[:, : self.top_k], chosen[:, : self.top_k]
        if self.normalise:
            # One column after the other: a library may sum by the number of rows.
            total = torch.zeros_like(weights[:, 0])
            for column in weights.unbind(dim=-1):
                total = total + column
            weights = weights / total[:, None]
        return chosen, weights.to(x.dtype).float()

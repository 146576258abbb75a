"""Embeddings that layers have of their own, beside the residual stream (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Matrices
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import UnquantizedWeight


def scaled_rows(table: UnquantizedWeight, token_ids: Tensor, width: int) -> Tensor:
    """Rows of a table, multiplied by the root of ``width``, which is rounded to their dtype."""
    rows = table.rows(token_ids)
    return rows * torch.tensor(width**0.5, dtype=rows.dtype).item()


@dataclass(frozen=True, slots=True)
class LayerInput(Matrices):
    """How a layer adds its own embedding to the residual stream."""

    kernels: Kernels
    gate: Linear
    projection: Linear
    norm: RMSNorm

    def __call__(self, residual: Tensor, embedded: Tensor) -> Tensor:
        """The addend, of [T, hidden] and the layer's [T, P]: [T, hidden]."""
        gated = self.kernels.gelu_mul(torch.cat((self.gate(residual), embedded), dim=1))
        return self.norm(self.projection(gated))


@dataclass(frozen=True, slots=True)
class LayerEmbeddings(Matrices):
    """The embeddings of all layers: of the token, and of its embedding in the residual stream.

    Attributes:
        table: [V, L * P].
        projection: hidden to [L * P].
        norm: of one layer's P.
    """

    table: UnquantizedWeight
    projection: Linear
    norm: RMSNorm

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[T] ids and [T, hidden] to [T, L, P]."""
        width = len(self.norm.weight)
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        normed = self.norm(projected.view(-1, width)).view(projected.shape)
        both: Tensor = (normed + scaled_rows(self.table, token_ids, width)) * 2.0**-0.5
        return both.view(len(both), -1, width)

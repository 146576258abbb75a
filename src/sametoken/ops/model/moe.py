"""MoE routing and weighted expert sum in plain PyTorch; also the CPU path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """``Experts`` as separate weights: [gate | up] and down of each expert."""

    gate_up: Sequence[Weight]
    down: Sequence[Weight]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down))

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Weighted sum of every row's experts, added in fp32 in the order of their ids."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            inner = self.gate_up[expert].gated_matmul(x[rows])
            output = self.down[expert].matmul(inner, out_dtype=out_dtype)
            out[rows] += output.float() * weights[rows, places, None]
        return out.to(out_dtype or x.dtype)


def moe_gate(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """See ``Kernels.moe_gate``."""
    probabilities = logits.float().softmax(dim=-1)
    weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k], chosen[:, :top_k]
    if normalise:
        # Column by column: the order of a library's sum may depend on the number of rows.
        total = torch.zeros_like(weights[:, 0])
        for column in weights.unbind(dim=-1):
            total = total + column
        weights = weights / total[:, None]
    return chosen, weights.to(logits.dtype).float()

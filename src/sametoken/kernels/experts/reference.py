"""Routing and experts in plain PyTorch; also the CPU path, with any bundle's products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sametoken.kernels.interface import Kernels, PackedExperts, PackedWeight


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts one by one: [gate | up] and down of each."""

    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down))


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """[T, top_k] expert ids and fp32 weights; of equal probabilities the lowest id wins."""
    probabilities = logits.float().softmax(dim=-1)
    weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k], chosen[:, :top_k]
    if normalise:
        # One column after the other: a library may sum by the number of rows.
        total = torch.zeros_like(weights[:, 0])
        for column in weights.unbind(dim=-1):
            total = total + column
        weights = weights / total[:, None]
    return chosen, weights.to(logits.dtype).float()


def mix(
    kernels: Kernels, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The weighted sum of every row's experts, added in the order of their ids, in fp32."""
    return _mixed(kernels, kernels.linear, x, experts, chosen, weights).to(x.dtype)


def mix_parts(
    kernels: Kernels, x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The same without rounding what an expert says, nor the sum: [T, H] fp32."""
    # Of the kernels' products, that of logits alone leaves its fp32 sums unrounded.
    return _mixed(kernels, kernels.logits, x, experts, chosen, weights)


def _mixed(
    kernels: Kernels,
    project_down: Callable[[Tensor, PackedWeight], Tensor],
    x: Tensor,
    experts: PackedExperts,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    assert isinstance(experts, SeparateExperts)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        rows, places = torch.nonzero(chosen == expert, as_tuple=True)
        inner = kernels.gated_linear(x[rows], experts.gate_up[expert])
        said = project_down(inner, experts.down[expert])
        out[rows] += said.float() * weights[rows, places, None]
    return out

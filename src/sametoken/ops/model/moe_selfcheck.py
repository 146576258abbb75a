"""Start-up self-check of experts: a row has the same bits in every batch on this chip.

Tiles differ with the number of rows, and what fills them with what the other rows choose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sametoken.ops.model.gemm.selfcheck import normal, require_row_law
from sametoken.ops.model.moe_triton import StackedExperts

#: Experts of a row. No product knows of the others.
_TOP_K = 2


def prove_experts(
    experts: StackedExperts,
    row_counts: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare rows among other rows, more and fewer, that choose other experts.

    Runs the experts once for each 16 rows of the largest count, and once for each bucket of counts;
    a run is four kernels, six where activations are rounded.

    Args:
        experts: of one layer, on ``device``.
        row_counts: as for ``require_row_law``.
        dtype: of activations.
        device: where products run.

    Raises:
        UnsupportedError: bits differ.
    """
    counts = tuple(row_counts)
    rows = _Rows.random(experts, max(counts), dtype, device)
    matrix = f"[{experts.gate_up.out_features}, {experts.gate_up.in_features}]"
    require_row_law(f"experts of {matrix}", rows.in_a_batch, counts)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Random rows and their experts: [T, hidden], [T, top_k] and [T, top_k]."""

    experts: StackedExperts
    x: Tensor
    chosen: Tensor
    weights: Tensor

    @classmethod
    def random(
        cls, experts: StackedExperts, count: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """``count`` rows."""
        generator = torch.Generator(device).manual_seed(0)
        num_experts, hidden = experts.num_experts, experts.down.out_features
        x = normal(generator, (count, hidden), dtype)
        shape = (count, num_experts)
        scores = torch.rand(shape, dtype=torch.float32, device=device, generator=generator)
        weights, chosen = scores.topk(min(_TOP_K, num_experts))
        return cls(experts, x, chosen, weights)

    def in_a_batch(self, rows: slice) -> Tensor:
        """A range of rows to its results, [rows, hidden], zeros for every second row.

        Those are other rows, which all choose two experts, other ones in each size of batch.
        """
        x, chosen, weights = (one[rows].clone() for one in (self.x, self.chosen, self.weights))
        x[1::2] *= -1
        crowded = x.shape[0].bit_length() + torch.arange(chosen.shape[1], device=x.device)
        chosen[1::2] = crowded % self.experts.num_experts
        out = self.experts(x, chosen, weights)
        out[1::2] = 0
        return out

"""Tensor parallelism as a layer sees it: copies between ranks, in rank order.

Ranks only ever copy to each other. Every sum over ranks is ours, in one fixed order
(``kernels.partial_sum``), so no algorithm of a communication library reaches a bit.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TensorParallel(Protocol):
    """This process among those that share one model.

    All ranks make the same calls in the same order, with the same shapes and dtypes.

    Attributes:
        rank: which part of every split weight is here; 0 decides.
        size: how many parts there are.
    """

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank, with its very bits, to [size, ...] in rank order."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, on every rank."""
        ...


class Alone:
    """One process with the whole model: nothing is copied."""

    rank = 0
    size = 1

    def gather(self, x: Tensor) -> Tensor:
        """[1, ...]."""
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


SINGLE_RANK = Alone()


def gather_columns(parallel: TensorParallel, x: Tensor) -> Tensor:
    """[R, C] of every rank side by side, in rank order: [R, size * C], contiguous."""
    if parallel.size == 1:
        return x
    return torch.cat(parallel.gather(x).unbind(0), dim=1)

"""Tensor parallelism: copies between ranks, in rank order.

Ranks only exchange copies. Sums over ranks are computed locally in a fixed order
(``kernels.partial_sum``), so results do not depend on a communication library's algorithm.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TensorParallel(Protocol):
    """One of the ranks that share a model.

    All ranks make the same calls in the same order, with the same shapes and dtypes.

    Attributes:
        rank: index of this rank's part of every split weight; rank 0 decides.
        size: number of ranks.
    """

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank, bit for bit, to [size, ...] in rank order."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, on every rank."""
        ...


class Alone:
    """A single rank with the whole model; copies nothing."""

    rank = 0
    size = 1

    def gather(self, x: Tensor) -> Tensor:
        """[1, ...]."""
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


SINGLE_RANK = Alone()


def gather_columns(parallel: TensorParallel, x: Tensor, total: int | None = None) -> Tensor:
    """Concatenate [R, C] of every rank in rank order: [R, size * C]; of one rank ``x`` itself.

    With a ``total`` of columns, ranks have parts as ``share.of_rank`` gives them: [R, total].
    """
    if parallel.size == 1:
        return x
    parts, width = parallel.gather(x.contiguous()), x.shape[1]
    last = parallel.size * width if total is None else total
    begins = (rank * width for rank in range(parallel.size))
    # A part that would end behind the last column begins as much before, where others end.
    new = (part[:, max(0, at + width - last) :] for at, part in zip(begins, parts, strict=True))
    return torch.cat(tuple(new), dim=1)


def own_columns(parallel: TensorParallel, whole: Tensor) -> Tensor:
    """This rank's columns of what ``gather_columns`` gives, or of its like."""
    size = whole.shape[1] // parallel.size
    return whole[:, parallel.rank * size : (parallel.rank + 1) * size]

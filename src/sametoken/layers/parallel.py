"""Tensor parallelism: copies between ranks, in rank order.

Ranks only exchange copies. Sums over ranks are computed locally in a fixed order
(``Kernels.partial_sum``), so results do not depend on a communication library's algorithm.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sametoken.ops.backend import Kernels


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

    def sum(
        self, kernels: Kernels, partial: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """``Kernels.partial_sum`` of all ranks' [T, N] fp32: [T, N], the same bits on all."""
        return kernels.partial_sum(self.gather(partial), dtype, bias)


class Alone(TensorParallel):
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


def of_rank(whole: range, parallel: TensorParallel, ranks_per_share: int = 1) -> range:
    """A rank's equal part of a range, which ``ranks_per_share`` adjacent ranks have.

    Where the range does not divide evenly, the last parts end with it and repeat what others have.
    """
    size = -(-len(whole) * ranks_per_share // parallel.size)
    first = min(parallel.rank // ranks_per_share * size, len(whole) - size)
    return whole[first : first + size]


def gather_columns(
    parallel: TensorParallel, x: Tensor, total: int | None = None, ranks_per_share: int = 1
) -> Tensor:
    """Concatenate [R, C] of every rank in rank order; of one rank ``x`` itself.

    Args:
        parallel: the ranks.
        x: this rank's columns.
        total: columns of all parts, if ranks have them as ``of_rank`` gives them.
        ranks_per_share: adjacent ranks that have the same columns, of which one's are taken.

    Returns:
        [R, total], by default [R, size / ranks_per_share * C].
    """
    if parallel.size == 1:
        return x
    parts, width = parallel.gather(x.contiguous())[::ranks_per_share], x.shape[1]
    last = len(parts) * width if total is None else total
    begins = (index * width for index in range(len(parts)))
    # A part that would end behind the last column begins as much before, where others end.
    new = (part[:, max(0, at + width - last) :] for at, part in zip(begins, parts, strict=True))
    return torch.cat(tuple(new), dim=1)


def own_columns(parallel: TensorParallel, whole: Tensor, ranks_per_share: int = 1) -> Tensor:
    """This rank's columns of what ``gather_columns`` gives, or of its like."""
    own = of_rank(range(whole.shape[1]), parallel, ranks_per_share)
    return whole[:, own.start : own.stop]

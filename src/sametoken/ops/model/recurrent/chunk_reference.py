"""What rules share of a chunk of positions as matrix products, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sametoken.ops.model.recurrent.rule import FAST_ROWS, ChunkFunction


def decays(own: Tensor) -> tuple[Tensor, Tensor]:
    """From the chunk's beginning to each row, and to row i from row j <= i, else 0.

    [H, n] logarithms -> [H, n, 1] and [H, n, n]. Sums of what lies between, not differences of
    sums, which would lose small decays after large ones.
    """
    length = own.shape[1]
    after = torch.ones(length, length, dtype=torch.bool, device=own.device).tril(-1)
    summed = torch.where(after, own[:, :, None], 0).cumsum(dim=1)
    between = summed.masked_fill(after.mT, -torch.inf)
    return own.cumsum(dim=1).exp()[..., None], between.exp()


def in_one_shape(
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    advance: Callable[..., Tensor],
    taps: int,
) -> ChunkFunction:
    """The fast form of a rule, which runs ``FAST_ROWS`` rows for any count, and so in one order.

    Args:
        prepare: from windows [n, K, C] and gates [n, G] of any rows to what ``advance`` takes.
        advance: from a state and that to all rows' outputs, [n, ..]; zeros change no state.
        taps: K.
    """

    def run_chunk(state: Tensor, mixed: Tensor, gates: Tensor) -> Tensor:
        count = len(gates)
        padding = 0, 0, 0, FAST_ROWS - count
        mixed, gates = functional.pad(mixed, padding), functional.pad(gates, padding)
        prepared = prepare(mixed.unfold(0, taps, 1).mT, gates)
        for part in prepared:
            part[count:] = 0
        return advance(state, *prepared).flatten(1)[:count]

    return run_chunk

"""Rows of a pass from what each of its runs holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, RowRuns

#: A run: its slot, the position of its first row, and how many rows follow.
Run = tuple[int, int, int]


def runs_of(
    lengths: Sequence[int], num_short: int | None = None, device: torch.device | str = "cpu"
) -> RowRuns:
    """Runs of these lengths, of which the first ``num_short`` are short; by default all are."""
    short = len(lengths) if num_short is None else num_short
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    return RowRuns(
        len(lengths), max(lengths, default=0), starts, short, max(lengths[:short], default=0)
    )


def ragged_rows(runs: Sequence[Run], block_table: Tensor, block_size: int) -> AttentionRows:
    """The rows of these runs, one after the other, and where their KV is written."""
    device = block_table.device
    where = [(slot, first + row) for slot, first, length in runs for row in range(length)]
    slots, positions = torch.tensor(where, device=device).view(-1, 2).t().contiguous().unbind(0)
    kv_slots = block_table[slots, positions // block_size] * block_size + positions % block_size
    ragged = runs_of([length for _, _, length in runs], device=device)
    return AttentionRows(positions, slots, kv_slots, block_table, ragged)

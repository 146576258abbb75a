"""The padded layout of a drafter's rows, in plain PyTorch.

Every plan row owns as many rows; dead ones stand at position 0 of the reserved slot. No shape
depends on the data, so that a whole chain of drafts can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sametoken.kernels.draft_rows.layout import CatchUp, Chains


def catch_up(
    sequences: Any,
    slots: Tensor,
    start: Tensor,
    end: Tensor,
    samples: Tensor,
    *,
    rows_per_plan_row: int,
    with_newest: bool,
) -> CatchUp:
    """Positions ``start .. end - 1`` of every plan row, and where its chain goes on.

    Plan rows that do not sample, and padding, have their chain in the reserved slot.

    Args:
        sequences: the device's truth (``state.sequences.Sequences``).
        slots: [B] int64; padding holds the reserved slot.
        start, end: [B] int64, ``end - start`` at most ``rows_per_plan_row``.
        samples: [B] bool.
        rows_per_plan_row: R, flat rows that each plan row owns in the step's hidden states.
        with_newest: whether the newest token, at ``end``, is run too by rows that sample. A
            row then holds its own token, and else the one after it.
    """
    width = rows_per_plan_row + with_newest
    stop = end + samples if with_newest else end
    offset = torch.arange(width, device=slots.device)
    positions = start[:, None] + offset
    live = positions < stop[:, None]
    row_slots = torch.where(live, slots[:, None], sequences.reserved_slot).flatten()
    positions = torch.where(live, positions, 0)
    committed = live & (positions < end[:, None])
    plan_rows = torch.arange(slots.shape[0], device=slots.device)
    positions = positions.flatten()
    ahead = 0 if with_newest else 1
    chain_positions = torch.where(samples, end, 0)
    chain_rows = sequences.rows_at(
        torch.where(samples, slots, sequences.reserved_slot),
        chain_positions,
        1,
        torch.zeros_like(samples),
    )
    return CatchUp(
        sequences.token_ids[row_slots, positions + ahead],
        sequences.rows_at(row_slots, positions, width, committed.flatten()),
        None,
        Chains(
            None,
            plan_rows * width + (stop - start - 1).clamp(min=0),
            chain_rows,
            chain_positions + 1,
        ),
    )


def advanced(sequences: Any, chains: Chains) -> Chains:
    """The chains one position on.

    Args:
        sequences: the device's truth (``state.sequences.Sequences``).
        chains: of ``catch_up``, or advanced before.
    """
    rows = sequences.rows_at(chains.rows.slots, chains.following, 1, chains.rows.committed)
    return Chains(chains.owner, chains.last, rows, chains.following + 1)


def take(rows: Tensor, states: Tensor) -> Tensor:
    """Copies of the given rows, [R] int64, of [T, W]."""
    return states[rows]


def stacked(tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
    """Draft ids [B, k] and their number [B], int64, of plan rows that all have a chain.

    Args:
        tokens: k of [B] int64, one for each draft position.
        samples: [B] bool; other rows get no drafts.
    """
    return torch.stack(tuple(tokens), dim=1), samples * len(tokens)

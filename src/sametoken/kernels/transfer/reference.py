"""Plans from a ring and verdicts to their places, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def fetch(entries: Tensor, turn: Tensor, plan: Tensor) -> None:
    """Read the entry of this turn into ``plan``, and count the turn.

    Args:
        entries: [N, E] int64.
        turn: [1] int64; the entry is its remainder by N.
        plan: int64 of at most E elements, contiguous.
    """
    entry = entries[int(turn) % entries.shape[0]]
    plan.view(-1).copy_(entry[: plan.numel()])
    turn += 1


def deliver(outcome: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write each row of ``outcome`` to its place among ``rows``.

    Args:
        outcome: [B, W] int64.
        places: [B] int64; below 0 for rows that nobody waits for.
        rows: [R, >= W] int64, written.
    """
    awaited = places >= 0
    rows[places[awaited].cpu(), : outcome.shape[1]] = outcome[awaited].to(rows.device)

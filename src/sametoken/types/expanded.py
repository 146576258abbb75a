"""Prompt chunks that run in the expanded form of latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.types.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ExpandedChunk:
    """A chunk of a step.

    Attributes:
        slot: of its request.
        first_row, num_rows: its rows.
        stop: number of positions that its last row sees.
    """

    slot: int
    first_row: int
    num_rows: int
    stop: int


def expanded_chunks(plan: StepPlan, row_starts: Sequence[int]) -> tuple[ExpandedChunk, ...]:
    """The chunks of a plan that are expanded, given every request's first row."""
    return tuple(
        ExpandedChunk(one.slot, first, one.num_query, one.expands_to)
        for one, first in zip(plan.requests, row_starts, strict=False)
        if one.expands_to
    )

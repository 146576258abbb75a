"""Prompt chunks that run in the fast form (``EngineConfig.fast_prompts_from``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.types.plan import StepPlan


@dataclass(frozen=True, slots=True)
class FastChunk:
    """A chunk of a step.

    Attributes:
        slot: of its request.
        first_row, num_rows: its rows.
        stop: number of positions that its last row sees.
        place: its index among the step's chunks, in the fast form or not.
    """

    slot: int
    first_row: int
    num_rows: int
    stop: int
    place: int = 0


def fast_chunks(plan: StepPlan, row_starts: Sequence[int]) -> tuple[FastChunk, ...]:
    """The chunks of a plan that are in the fast form, given every request's first row."""
    num_windows = sum(one.samples and one.num_query == 1 for one in plan.requests)
    return tuple(
        FastChunk(one.slot, first, one.num_query, one.fast_to, index - num_windows)
        for index, (one, first) in enumerate(zip(plan.requests, row_starts, strict=False))
        if one.fast_to
    )

"""Which positions of a prompt are in the fast form (``EngineConfig.fast_prompts_from``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.types.plan import StepPlan


def fast_end(prompt_len: int, least_len: int, multiple: int) -> int:
    """Positions of a prompt, the first ones, in the fast form: by its own length alone.

    The last token is no part of it if it would be a chunk of its own, which is a window.

    Args:
        prompt_len: tokens of the prompt.
        least_len: tokens from which prompts have the form; 0: none has.
        multiple: positions at which chunks begin are multiples of it.
    """
    if not 0 < least_len <= prompt_len:
        return 0
    return prompt_len - (prompt_len % multiple == 1 % multiple)


@dataclass(frozen=True, slots=True)
class ExpandedChunk:
    """A chunk of a step whose latents are expanded.

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
    """The chunks of a plan that are in the fast form, given every request's first row."""
    return tuple(
        ExpandedChunk(one.slot, first, one.num_query, one.fast_to)
        for one, first in zip(plan.requests, row_starts, strict=False)
        if one.fast_to
    )

"""Drafts in place of padding: a captured step computes all rows of its shape in any case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import TYPE_CHECKING

from sametoken.scheduler.limits import SchedulerLimits
from sametoken.types.layout import StepShape

if TYPE_CHECKING:
    from sametoken.scheduler.plan_draft import Turn


def with_drafts_for_padding(turns: Sequence[Turn], limits: SchedulerLimits) -> list[Turn]:
    """The turns of a step, the likeliest with a draft more, as many as there are rows of padding.

    The same captured shape holds the step before and after.
    """
    if not (limits.adaptive_drafts and limits.captured_shapes):
        return list(turns)
    needed = shape_of(turns)
    shape = next((one for one in limits.captured_shapes if one.holds(needed)), needed)
    spare = min(shape.num_rows - needed.num_rows, shape.num_sampled - needed.num_sampled)
    most = min(shape.max_window - 1, limits.num_speculative_tokens)
    able = [
        turn
        for turn in turns
        if not turn.request.prefilling
        and turn.request.drafts.proposes
        and turn.draft_limit < turn.request.most_drafts(most)
    ]
    likeliest = {
        turn.request: replace(turn, draft_limit=turn.draft_limit + 1)
        for turn in nlargest(spare, able, key=_chance_of_one_more)
    }
    return [likeliest.get(turn.request, turn) for turn in turns]


def _chance_of_one_more(turn: Turn) -> float:
    return turn.request.drafts.chance(turn.draft_limit + 1)


def shape_of(turns: Sequence[Turn]) -> StepShape:
    """The sizes of their step without padding, as its ``StepLayout`` will have them."""
    rows = [turn.num_rows for turn in turns]
    windows = [turn.draft_limit + 1 for turn in turns if turn.samples]
    return StepShape(
        num_requests=len(turns),
        num_rows=sum(rows),
        num_sampled=sum(windows),
        num_windows=sum(turn.is_window for turn in turns),
        max_window=max(windows, default=0),
        max_rows=max(rows, default=0),
    )

"""Drafts for captured steps: such a step computes all rows of its shape, padding or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import TYPE_CHECKING

from sametoken.scheduler.limits import SchedulerLimits
from sametoken.types.layout import StepShape

if TYPE_CHECKING:
    from sametoken.scheduler.plan_draft import Turn


def fit_to_captured(
    turns: Sequence[Turn], limits: SchedulerLimits, num_read_rows: float
) -> list[Turn]:
    """The turns of a step, with the drafts that its captured shape makes worth their rows.

    Padding's rows go to the likeliest further drafts, one a request at most. No window has a draft
    if they all make fewer tokens by the rows that the step would do without than single rows do.
    ``num_read_rows`` is as in ``draft_limits``; where it is infinite nothing changes.
    """
    if math.isinf(num_read_rows) or not limits.captured_shapes:
        return list(turns)
    needed = shape_of(turns)
    shape = _captured(needed, limits)
    fitted = _filled(turns, needed, shape, limits.num_speculative_tokens)
    more_rows = shape.num_rows - _captured(_without_drafts(needed, turns), limits).num_rows
    expected = sum(turn.request.drafts.expected(turn.draft_limit) for turn in fitted)
    if expected < more_rows * needed.num_windows / (needed.num_windows + num_read_rows):
        return [replace(turn, draft_limit=0) for turn in turns]
    return fitted


def _captured(needed: StepShape, limits: SchedulerLimits) -> StepShape:
    """What a step of these sizes is padded to; itself without a captured shape."""
    return next((shape for shape in limits.captured_shapes if shape.holds(needed)), needed)


def _filled(turns: Sequence[Turn], needed: StepShape, shape: StepShape, k: int) -> list[Turn]:
    spare = min(shape.num_rows - needed.num_rows, shape.num_sampled - needed.num_sampled)
    most = min(shape.max_window - 1, k)
    able = [
        turn
        for turn in turns
        if not turn.request.prefilling
        and turn.request.drafts.proposes
        and turn.draft_limit < turn.request.most_drafts(most)
    ]
    longer = {
        turn.request: replace(turn, draft_limit=turn.draft_limit + 1)
        for turn in nlargest(spare, able, key=_chance_of_one_more)
    }
    return [longer.get(turn.request, turn) for turn in turns]


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


def _without_drafts(shape: StepShape, turns: Sequence[Turn]) -> StepShape:
    drafts = sum(turn.draft_limit for turn in turns)
    return replace(
        shape,
        num_rows=shape.num_rows - drafts,
        num_sampled=shape.num_sampled - drafts,
        max_window=1,
        max_rows=max((turn.num_query for turn in turns), default=0),
    )

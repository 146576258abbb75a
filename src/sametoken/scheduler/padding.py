"""Drafts for captured steps: such a step computes all rows of its shape, padding or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import TYPE_CHECKING

from sametoken.scheduler.draft_limits import DraftWorth
from sametoken.types.layout import StepShape

if TYPE_CHECKING:
    from sametoken.scheduler.plan_draft import Turn
    from sametoken.scheduler.request_state import RequestState


def fit_to_captured(
    turns: Sequence[Turn], worth: DraftWorth, shapes: Sequence[StepShape]
) -> list[Turn]:
    """The turns of a step, with the drafts that its captured shape makes worth their rows.

    Padding's rows go to the likeliest further drafts, one a request at most, if these are worth
    the experts that they choose. No window has a draft if they all make fewer tokens by the time
    that the step would do without than single rows do.
    """
    if not shapes:
        return list(turns)
    needed = shape_of(turns)
    shape, single = _captured(needed, shapes), _without_drafts(needed, turns)
    drafts = {turn.request: turn.draft_limit for turn in turns if turn.request in worth.windows}
    for request in _longer(drafts, needed, shape, worth):
        drafts[request] += 1
    num_rows, captured = single.num_rows + sum(drafts.values()), _captured(single, shapes)
    more_time = worth.time.of(num_rows, shape.num_rows - num_rows) - worth.time.of(
        single.num_rows, captured.num_rows - single.num_rows
    )
    if worth.accepted(drafts) < more_time * worth.tokens_per_time({}):
        drafts = {}
    return [turn.cut(turn.num_query + drafts.get(turn.request, 0)) for turn in turns]


def _captured(needed: StepShape, shapes: Sequence[StepShape]) -> StepShape:
    """What a step of these sizes is padded to; itself without a captured shape."""
    return next((shape for shape in shapes if shape.holds(needed)), needed)


def _longer(
    drafts: Mapping[RequestState, int], needed: StepShape, shape: StepShape, worth: DraftWorth
) -> list[RequestState]:
    """Those that have one draft more, in place of padding."""
    spare = min(shape.num_rows - needed.num_rows, shape.num_sampled - needed.num_sampled)
    least = worth.tokens_per_time(drafts) * worth.time.of_experts(needed.num_rows)
    chances = {
        request: worth.windows[request].chance(limit + 1)
        for request, limit in drafts.items()
        if limit < min(worth.windows[request].most, shape.max_window - 1)
    }
    likeliest = nlargest(spare, chances, key=lambda request: chances[request])
    return [request for request in likeliest if chances[request] >= least]


def shape_of(turns: Sequence[Turn]) -> StepShape:
    """The sizes of a step that samples, without padding, as its ``StepLayout`` will have them."""
    rows = [turn.num_rows for turn in turns]
    windows = [turn.draft_limit + 1 for turn in turns if turn.samples]
    return StepShape(
        num_requests=len(turns),
        num_rows=sum(rows),
        num_sampled=sum(windows),
        num_windows=sum(turn.is_window for turn in turns),
        max_window=max(windows),
        max_rows=max(rows),
    )


def _without_drafts(shape: StepShape, turns: Sequence[Turn]) -> StepShape:
    drafts = sum(turn.draft_limit for turn in turns)
    return replace(
        shape,
        num_rows=shape.num_rows - drafts,
        num_sampled=shape.num_sampled - drafts,
        max_window=1,
        max_rows=max(turn.num_query for turn in turns),
    )

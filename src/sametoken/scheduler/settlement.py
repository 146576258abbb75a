"""From a row's verdict to the news for its request."""

from __future__ import annotations

from sametoken.core.outputs import RowResult
from sametoken.core.plan import PlanRow
from sametoken.core.request import RequestUpdate
from sametoken.errors import InvariantError
from sametoken.scheduler.request_state import RequestState


def settled_update(request: RequestState, row: PlanRow, result: RowResult) -> RequestUpdate | None:
    """Narrow the request's length bound and note its tokens; None if there is nothing to report.

    Raises:
        InvariantError: the plan row cannot have this verdict.
    """
    _require_fit(row, result)
    if row.samples:
        # The end of a prompt is no window: nothing could be proposed for it.
        if request.emitted:
            request.drafts = request.drafts.after(
                result.num_drafts, result.num_proposed, result.num_accepted
            )
        request.bound = request.bound.after_settle(row.draft_limit, result.num_accepted)
        request.emitted.extend(result.token_ids)
    elif result.prompt_logprobs is None:
        return None
    return RequestUpdate(
        request_id=request.request.request_id,
        token_ids=result.token_ids,
        num_drafts=result.num_drafts,
        num_accepted=result.num_accepted,
        samples=row.samples,
        num_cached=request.num_cached,
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
    )


def poisoned_update(request: RequestState, row: PlanRow, result: RowResult) -> RequestUpdate:
    """The news that a request's row cannot be judged, and why; nothing else of its verdict."""
    return RequestUpdate(
        request_id=request.request.request_id,
        token_ids=(),
        num_drafts=0,
        num_accepted=0,
        samples=row.samples,
        num_cached=request.num_cached,
        poisoned=True,
        stuck=result.stuck,
    )


def _require_fit(row: PlanRow, result: RowResult) -> None:
    limit = row.draft_limit if row.samples else 0
    if not 0 <= result.num_accepted <= result.num_drafts <= limit:
        raise InvariantError(
            f"slot {row.slot} accepted {result.num_accepted} of {result.num_drafts} drafts "
            f"where at most {limit} were planned"
        )
    emitted = result.num_accepted + 1 if row.samples else 0
    if len(result.token_ids) != emitted:
        raise InvariantError(
            f"slot {row.slot} emitted {len(result.token_ids)} tokens, expected {emitted}"
        )

"""How the rows of one step are shared out."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.scheduler.draft_limits import draft_limits
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import Turn
from sametoken.scheduler.request_state import RequestState

#: Prompts may count on one row of so many, and small prompts on one of so many of theirs.
SHARE = 4


class RowBudget:
    """One budget of rows for all that a step computes.

    Decoding requests come first with a row each, then their drafts. Prompts have the rest, first
    come, first served: the oldest takes as much as is left. Nobody waits for long:

    - While prompts can run, drafts leave them a quarter of the step. Where even the single rows
      of decoding requests fill a step, every second step has that quarter.
    - A prompt that does not end in the step leaves a quarter of the prompts' rows to younger
      prompts that do end, within that quarter.
    - Where not all decoding requests fit, those served least recently go first.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._draft_limits = draft_limits(limits)

    def share(self, step_id: int, candidates: Sequence[RequestState]) -> list[Turn]:
        """Turns for requests that can run, in the order given, which is that of age."""
        rows = self._limits.max_num_batched_tokens
        decodes = [request for request in candidates if not request.prefilling]
        prompts = [request for request in candidates if request.prefilling]
        kept = max(1, rows // SHARE) if prompts else 0
        is_prompts_turn = len(decodes) >= rows and step_id % 2
        decodes.sort(key=lambda request: request.last_step)
        served = decodes[: rows - kept if is_prompts_turn else rows]
        room = rows - len(served)
        wanted = {request: self._most_drafts(request, len(served)) for request in served}
        chunks = self._chunks(prompts, max(room - sum(wanted.values()), min(room, kept)))
        drafts = _fair_shares(wanted, room - sum(chunks.values()))
        turns = {request: Turn(request, 1, limit) for request, limit in drafts.items()}
        turns |= {request: Turn(request, chunk, 0) for request, chunk in chunks.items() if chunk}
        return [turns[request] for request in candidates if request in turns]

    def _most_drafts(self, request: RequestState, num_decoding: int) -> int:
        worth = self._draft_limits.limit(request.drafts, num_decoding)
        return min(worth, request.max_drafts(self._limits.num_speculative_tokens))

    def _chunks(self, prompts: Sequence[RequestState], room: int) -> dict[RequestState, int]:
        """Rows of each prompt; one that does not end leaves a share to those that do."""
        longest = self._limits.longest_chunk
        chunks: dict[RequestState, int] = {}
        to_end = room
        for request in prompts:
            if request.num_left <= min(to_end, longest):
                chunks[request] = request.num_left
                to_end -= request.num_left
                room -= request.num_left
            else:
                to_end = min(to_end, room // SHARE)
        for request in prompts:
            if request not in chunks:
                chunks[request] = min(request.num_left, longest, room)
                room -= chunks[request]
        return chunks


def _fair_shares(wanted: dict[RequestState, int], rows: int) -> dict[RequestState, int]:
    """To each what it wants, and where that is too much, equal shares to those who want more."""
    shares: dict[RequestState, int] = {}
    for request in sorted(wanted, key=lambda request: wanted[request]):
        shares[request] = min(wanted[request], rows // (len(wanted) - len(shares)))
        rows -= shares[request]
    return shares

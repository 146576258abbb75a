"""A plan while it is being made.

How the rows of one step are shared out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sametoken.scheduler.draft_limits import draft_limits
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.request_state import RequestState
from sametoken.types.plan import (
    Admission,
    BlockAssignment,
    ScheduledRequest,
    StepPlan,
    SwapIn,
    SwapOut,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's part in the next step, before it is launched.

    ``num_query`` and ``draft_limit`` are as in ``ScheduledRequest``.
    """

    request: RequestState
    num_query: int
    draft_limit: int

    @property
    def num_rows(self) -> int:
        """What it takes from the step's row budget."""
        return self.num_query + self.draft_limit

    @property
    def is_window(self) -> bool:
        """Whether it computes one committed token and samples; else it is a chunk."""
        return self.samples and self.num_query == 1

    @property
    def samples(self) -> bool:
        """Whether it reaches the last committed token."""
        request = self.request
        return not request.prefilling or request.position + self.num_query == request.prompt_len

    @property
    def hi_after(self) -> int:
        """Tokens that blocks must have room for: the length if every draft is accepted.

        For a chunk inside a prompt, its end and one token more.
        """
        request = self.request
        start = request.position if request.prefilling else request.bound.hi
        return start + self.draft_limit + (self.num_query + 1 if request.prefilling else 1)

    def cut(self, num_rows: int) -> Turn:
        """The turn in so many rows, one at least."""
        num_query = num_rows if self.request.prefilling else 1
        return Turn(self.request, num_query, num_rows - num_query)

    def row(self) -> ScheduledRequest:
        """The turn as the device sees it."""
        return ScheduledRequest(
            self.request.held_slot, self.num_query, self.draft_limit, self.samples
        )


@dataclass(slots=True)
class PlanDraft:
    """The parts of a plan, gathered request by request.

    Attributes:
        step_id: the step to be.
        short_of_blocks: blocks were lacking, so nobody else may come in.
    """

    step_id: int
    short_of_blocks: bool = False
    swap_outs: list[SwapOut] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    block_assignments: list[BlockAssignment] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def assign_blocks(self, request: RequestState, new_blocks: list[int]) -> None:
        """Append blocks to a request's table."""
        if new_blocks:
            first_index = len(request.blocks)
            request.blocks.extend(new_blocks)
            self.block_assignments.append(
                BlockAssignment(request.held_slot, first_index, tuple(new_blocks))
            )

    def admit(self, request: RequestState) -> None:
        """Announce a request that has just got its slot."""
        asked = request.request
        self.admissions.append(
            Admission(
                slot=request.held_slot,
                prompt_token_ids=asked.prompt_token_ids,
                num_cached=request.num_cached,
                params=asked.params,
                stop_token_ids=asked.stop_token_ids,
                bad_words_token_ids=asked.bad_words_token_ids,
                grammar=asked.grammar,
                request_id=asked.request_id,
            )
        )

    def build(self, discarded_swaps: tuple[str, ...]) -> StepPlan:
        """The finished plan, windows before chunks; ``turns`` are left in its order."""
        self.turns.sort(key=lambda turn: not turn.is_window)
        return StepPlan(
            step_id=self.step_id,
            swap_outs=tuple(self.swap_outs),
            discarded_swaps=discarded_swaps,
            admissions=tuple(self.admissions),
            block_assignments=tuple(self.block_assignments),
            swap_ins=tuple(self.swap_ins),
            requests=tuple(turn.row() for turn in self.turns),
        )


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
        return min(worth, request.most_drafts(self._limits.num_speculative_tokens))

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

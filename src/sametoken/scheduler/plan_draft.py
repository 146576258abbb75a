"""A plan while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from sametoken.core.plan import (
    Admission,
    BlockAssignment,
    PlanRow,
    StepPlan,
    SwapIn,
    SwapOut,
)
from sametoken.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's part in the next step, before it is launched.

    ``num_query`` and ``draft_limit`` are as in ``PlanRow``.
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

    def row(self) -> PlanRow:
        """The turn as the device sees it."""
        return PlanRow(self.request.held_slot, self.num_query, self.draft_limit, self.samples)


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
            rows=tuple(turn.row() for turn in self.turns),
        )

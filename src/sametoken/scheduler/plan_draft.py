"""A plan under construction, and the row budget that divides a step among requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate, islice
from typing import NamedTuple

from sametoken.scheduler.draft_limits import DraftWorth, windows_of
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.padding import fit_to_captured
from sametoken.scheduler.request_state import RequestState
from sametoken.types.plan import (
    Admission,
    BlockAssignment,
    ScheduledRequest,
    StateCopy,
    StepPlan,
    SwapIn,
    SwapOut,
)


class Turn(NamedTuple):
    """One request's share of the next step, before it is launched.

    ``num_query`` and ``draft_limit`` are as in ``ScheduledRequest``.
    """

    request: RequestState
    num_query: int
    draft_limit: int

    @property
    def num_rows(self) -> int:
        """Rows taken from the step's row budget."""
        return self.num_query + self.draft_limit

    @property
    def is_window(self) -> bool:
        """Whether it computes one committed token and samples; otherwise it is a chunk."""
        return self.num_query == 1 and self.samples

    @property
    def samples(self) -> bool:
        """Whether it includes the last committed token."""
        request = self.request
        if not request.prefilling:
            return True
        return not request.replays and request.position + self.num_query == request.prompt_len

    @property
    def hi_after(self) -> int:
        """Tokens that blocks must hold: the length if every draft is accepted.

        For a chunk inside a prompt: the end of the chunk plus one token.
        """
        request = self.request
        end = request.position + self.num_query if request.prefilling else request.bound.hi
        return end + self.draft_limit + 1

    @classmethod
    def least(cls, request: RequestState) -> Turn:
        """A request's shortest turn."""
        return cls(request, request.least_query, 0)

    def cut(self, num_rows: int) -> Turn:
        """The turn with ``num_rows`` rows, or of a chunk that does not end the multiple below."""
        request = self.request
        if not request.prefilling:
            return Turn(request, 1, num_rows - 1)
        rest = num_rows % request.least_query if num_rows < request.num_left else 0
        return Turn(request, num_rows - rest, 0)

    def scheduled(self) -> ScheduledRequest:
        """The turn as part of a plan."""
        request, num_query, draft_limit = self
        if not request.prefilling:
            return ScheduledRequest(request.held_slot, num_query, draft_limit, samples=True)
        samples, expanded_to = self.samples, request.expanded_to(num_query)
        return ScheduledRequest(
            request.held_slot, num_query, draft_limit, samples, request.replays, expanded_to
        )


@dataclass(slots=True)
class PlanDraft:
    """The parts of a plan, collected request by request.

    Attributes:
        step_id: the id of the next step.
        short_of_blocks: blocks ran out, so no further request may be admitted or swapped in.
    """

    step_id: int
    short_of_blocks: bool = False
    swap_outs: list[SwapOut] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    block_assignments: list[BlockAssignment] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    restored_states: list[StateCopy] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def assign_blocks(self, request: RequestState, new_blocks: list[int]) -> None:
        """Append blocks to a request's table."""
        if not new_blocks:
            return
        first_index, slot, blocks = request.table_len, request.held_slot, tuple(new_blocks)
        request.blocks.extend(new_blocks)
        if self.block_assignments and self.block_assignments[-1].slot == slot:
            begun = self.block_assignments.pop()
            first_index, blocks = begun.first_index, begun.block_ids + blocks
        self.block_assignments.append(BlockAssignment(slot, first_index, blocks))

    def admit(self, request: RequestState) -> None:
        """Add the admission of a request that has just got its slot."""
        admitted = request.request
        self.admissions.append(
            Admission(
                slot=request.held_slot,
                prompt_token_ids=admitted.prompt_token_ids,
                num_cached=request.num_cached,
                params=admitted.params,
                stop_token_ids=admitted.stop_token_ids,
                bad_words_token_ids=admitted.bad_words_token_ids,
                grammar=admitted.grammar,
                request_id=admitted.request_id,
                prompt_temperature=admitted.prompt_temperature,
                adapter=admitted.adapter,
            )
        )

    def build(self, kept_states: Sequence[StateCopy], num_wanted: int | None = None) -> StepPlan:
        """The finished plan, its requests in order; ``turns`` are sorted likewise."""
        self.turns.sort(key=_order)
        return StepPlan(
            step_id=self.step_id,
            swap_outs=tuple(self.swap_outs),
            restarts=tuple(self.restarts),
            admissions=tuple(self.admissions),
            block_assignments=tuple(self.block_assignments),
            swap_ins=tuple(self.swap_ins),
            restored_states=tuple(self.restored_states),
            requests=tuple(turn.scheduled() for turn in self.turns),
            kept_states=tuple(kept_states),
            num_wanted=num_wanted,
        )


def _order(turn: Turn) -> int:
    """0 of a window, 1 of a chunk, 2 of an expanded one."""
    return 0 if turn.is_window else 1 + (turn.request.expanded_to(1) > 0)


#: Sampled rows of a step, if there are not more requests: each has logits over the vocabulary.
MOST_SAMPLED_ROWS = 4096


def max_sampled_rows(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """An upper bound of a step's sampled rows, however large its row budget."""
    return min(max_num_batched_tokens, max(MOST_SAMPLED_ROWS, max_num_seqs))


#: Prompts are guaranteed 1 / SHARE of a step's rows, and short prompts 1 / SHARE of those.
SHARE = 4


class RowBudget:
    """One row budget per step for decoding requests, drafts and prompt chunks.

    It is ``usual_rows``, or twice the decoding requests, or half of what prompts of at most
    ``usual_rows`` wait for: the larger the crowd, the less a longer step delays its first tokens.
    A prompt of expanded latents has ``max_num_batched_tokens``, as each step expands them anew, and
    one longer than ``usual_rows`` of a model with experts too, while nobody decodes: the more rows
    of an expert a step has, the less one of them takes.
    Decoding requests get one row each, then their drafts. Prompts get the rest, first come, first
    served: the oldest takes as much as is left. These rules bound the waiting time:

    - While prompts can run, drafts leave them a quarter of the step. If decoding requests alone
      take part of it, every second step reserves that quarter.
    - If all prompts could end in the step, those behind ``busy_rows`` wait for the next: the others
      have their first token earlier, and they about when they would.
    - A prompt that does not end in the step leaves a quarter of the prompts' rows to younger
      prompts that end within that quarter.
    - If not all decoding requests fit, the least recently served go first.
    - Drafts take no more sampled rows than ``max_sampled_rows``, and the rows of padding.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def share(self, step_id: int, candidates: Sequence[RequestState]) -> list[Turn]:
        """Turns for requests that can run, in the order of ``candidates``, oldest first."""
        decodes = [request for request in candidates if not request.prefilling]
        prompts = {request: request.num_left for request in candidates if request.prefilling}
        longest = self._longest_chunk(len(decodes), prompts)
        rows = self._rows(len(decodes), prompts.values(), longest)
        reserved = max(1, rows // SHARE) if prompts else 0
        most_served = rows - reserved if step_id % 2 else rows
        served = decodes
        if len(decodes) > most_served:
            served = nsmallest(most_served, decodes, key=lambda request: request.last_step)
        left = rows - len(served)
        k, beside = self._limits.num_speculative_tokens, min(left, sum(prompts.values()))
        most = {request: request.most_drafts(k) for request in served}
        worth = self._worth(most)
        wanted = worth.limits(beside) if worth else most
        most_rows = max(left - sum(wanted.values()), min(left, reserved))
        chunks = self._chunks(prompts, most_rows, longest)
        ending = sum(chunk == prompts[request] for request, chunk in chunks.items())
        sampled = max_sampled_rows(rows, self._limits.max_num_seqs) - len(served) - ending
        drafts = _fair_shares(wanted, min(left - sum(chunks.values()), sampled))
        turns: list[Turn] = []
        for request in candidates:
            if (limit := drafts.get(request)) is not None:
                turns.append(Turn(request, 1, limit))
            elif chunk := chunks.get(request):
                turns.append(Turn(request, chunk, 0))
        return fit_to_captured(turns, worth, self._limits.captured_shapes) if worth else turns

    def num_wanted(self, turns: Iterable[Turn]) -> int | None:
        """``StepPlan.num_wanted`` of a step, for the next windows of requests that sample."""
        k, costs = self._limits.num_speculative_tokens, self._limits.reads.draft_share > 0
        sampling = (turn.request for turn in turns if turn.samples) if costs else ()
        worth = self._worth({request: request.most_drafts(k) for request in sampling})
        return worth.num_wanted() if worth else None

    def _longest_chunk(self, num_decoding: int, prompts: dict[RequestState, int]) -> int:
        limits = self._limits
        sparse = limits.reads.experts_bytes and not num_decoding
        long = sparse and any(length > limits.usual_rows for length in prompts.values())
        if long or any(request.expanded_to(1) for request in prompts):
            return limits.longest_chunk
        return min(limits.longest_chunk, limits.usual_rows)

    def _rows(self, num_decoding: int, lengths: Iterable[int], longest_chunk: int) -> int:
        usual, most = self._limits.usual_rows, self._limits.max_num_batched_tokens
        crowd = sum(length for length in lengths if length <= usual)
        return min(most, max(usual, longest_chunk, 2 * num_decoding, crowd // 2))

    def _worth(self, most: dict[RequestState, int]) -> DraftWorth | None:
        """None where limits are fixed, or drafts free: in small steps of rows without experts."""
        limits = self._limits
        num_rows = len(most) * (limits.num_speculative_tokens + 1)
        small = num_rows <= limits.reads.free_rows and not limits.reads.experts_bytes
        if small or not (most and limits.adaptive_drafts):
            return None
        requests = {request: (request.drafts, n) for request, n in most.items()}
        windows = windows_of(requests, dead_rows=limits.reads.dead_rows)
        return DraftWorth(windows, limits.reads.time(len(most), sum(one.bound.hi for one in most)))

    def _chunks(
        self, prompts: dict[RequestState, int], rows: int, longest: int
    ) -> dict[RequestState, int]:
        """Rows of each prompt, given its length; one that does not end leaves a share to others."""
        chunks: dict[RequestState, int] = {}
        to_end = rows
        before = list(accumulate(prompts.values(), initial=0))
        if before[-1] <= rows and all(length <= longest for length in prompts.values()):
            prompts = dict(islice(prompts.items(), bisect_left(before, self._limits.busy_rows)))
        for request, length in prompts.items():
            if length <= min(to_end, longest):
                chunks[request] = length
                to_end -= length
                rows -= length
            else:
                to_end = min(to_end, rows // SHARE)
        for request, length in prompts.items():
            if request not in chunks:
                chunks[request] = Turn(request, length, 0).cut(min(length, longest, rows)).num_query
                rows -= chunks[request]
        return chunks


def _fair_shares(wanted: dict[RequestState, int], rows: int) -> dict[RequestState, int]:
    """Max-min fair shares: small demands are met, the others get equal shares of the rest."""
    if sum(wanted.values()) <= rows:
        return wanted
    shares: dict[RequestState, int] = {}
    for request in sorted(wanted, key=lambda request: wanted[request]):
        shares[request] = min(wanted[request], rows // (len(wanted) - len(shares)))
        rows -= shares[request]
    return shares

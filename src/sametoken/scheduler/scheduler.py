"""Plan steps ahead of the device; settle their results in step order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sametoken.core.length_bound import LenBound
from sametoken.core.outputs import RowResult, StepResult
from sametoken.core.plan import PlanRow, StepPlan, SwapIn, SwapOut
from sametoken.core.request import EngineRequest, RequestUpdate
from sametoken.errors import InvariantError, RequestError
from sametoken.scheduler.integrity import (
    check_blocks,
    check_in_flight,
    check_requests,
    check_slots,
)
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import PlanDraft, Turn
from sametoken.scheduler.request_state import RequestState, SavedKV, Status
from sametoken.scheduler.row_budget import RowBudget
from sametoken.scheduler.settlement import poisoned_update, settled_update


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    plan: StepPlan
    requests: tuple[RequestState, ...]


class Scheduler:
    """Decides who runs in each step and who owns which slot and block.

    Requests are older or younger by arrival. Every running request is older than every
    swapped one, and those are older than every waiting one; older ones are served first
    wherever memory is short, and rows are shared in turn.

    Attributes:
        prefix_cache_queries: prompt tokens of admitted requests that were looked up.
        prefix_cache_hits: how many of them the prefix cache supplied.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._limits = limits
        self._memory = KVMemory(limits)
        self._pool = self._memory.pool
        self._budget = RowBudget(limits)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        # All by request id; ``_running`` and ``_waiting`` are in order of age.
        self._waiting: dict[str, RequestState] = {}
        self._running: dict[str, RequestState] = {}
        self._swapped: dict[str, RequestState] = {}
        # Released, with steps in flight that still use their slots and blocks.
        self._lingering: list[RequestState] = []
        self._discarded: list[str] = []
        self._in_flight: deque[_StepInFlight] = deque()
        self._next_step_id = 0
        self._next_arrival = 0
        self._decodes_yield = False

    @property
    def limits(self) -> SchedulerLimits:
        """The bounds of every plan."""
        return self._limits

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to plan or to settle, released requests' steps included."""
        requests = self._waiting or self._running or self._swapped
        return bool(requests or self._in_flight or self._discarded)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and KV blocks and are not released."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that were never admitted."""
        return sum(request.prompt_len for request in self._waiting.values())

    @property
    def num_swapped(self) -> int:
        """Requests whose KV was moved to host memory."""
        return len(self._swapped)

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that requests hold, 0..1; merely cached ones not counted."""
        return self._pool.num_referenced / self._pool.num_blocks

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run, or its id is taken.
        """
        for requests in (self._waiting, self._running, self._swapped):
            if request.request_id in requests:
                raise RequestError(
                    f"request {request.request_id!r} is already here", "choose another request id"
                )
        self._limits.require_possible(request)
        self._waiting[request.request_id] = RequestState(
            request=request,
            arrival=self._next_arrival,
            block_keys=self._memory.keys(request),
            bound=LenBound.known(len(request.prompt_token_ids)),
        )
        self._next_arrival += 1

    def release(self, request_id: str, num_kept_tokens: int | None = None) -> None:
        """Forget a request that is finished or aborted; unknown ids are ignored.

        It is in no later plan. Its slot and blocks stay its own until its steps in flight
        are settled, which brings no more updates.

        Args:
            request_id: whom to forget.
            num_kept_tokens: tokens of prompt and output that were not cut; blocks of those
                may serve later prompts. Only the caller knows where it has cut an update.
                None lets no block of emitted tokens into the prefix cache.

        Raises:
            InvariantError: it cannot keep so few, or so many.
        """
        request = None
        for requests in (self._waiting, self._running, self._swapped):
            request = request or requests.pop(request_id, None)
        if request is None:
            return
        request.status = Status.RELEASED
        self._lingering.append(request)
        if num_kept_tokens is not None:
            self._memory.index_kept(request, num_kept_tokens)
        self._free_settled()

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be launched now.

        A plan without rows only discards swapped KV; it is settled like any other.
        """
        draft = PlanDraft(self._next_step_id, self._budget.rows)
        # Oldest first, so that those who lose their blocks have had no turn in this plan.
        for turn in sorted(self._choose_turns(draft), key=lambda turn: turn.request.arrival):
            self._grant(turn, draft)
        if not draft.short_of_blocks:
            self._bring_back(draft)
            self._admit(draft)
        if not draft.turns and not self._discarded:
            return None
        return self._launch(draft)

    def settle(self, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Learn the verdict of the oldest step in flight.

        Raises:
            InvariantError: the result is of another step, or does not fit the plan.
        """
        if not self._in_flight or self._in_flight[0].plan.step_id != result.step_id:
            expected = self._in_flight[0].plan.step_id if self._in_flight else "none"
            raise InvariantError(f"result of step {result.step_id} arrived, expected {expected}")
        step = self._in_flight[0]
        if len(result.rows) != len(step.requests):
            raise InvariantError(
                f"result of step {result.step_id} has {len(result.rows)} rows, "
                f"its plan {len(step.requests)}"
            )
        self._in_flight.popleft()
        updates = [
            self._settle_row(request, row, row_result)
            for request, row, row_result in zip(
                step.requests, step.plan.rows, result.rows, strict=True
            )
        ]
        self._free_settled()
        return tuple(update for update in updates if update is not None)

    def check_integrity(self) -> None:
        """Hold every slot, block and list against each other.

        Raises:
            InvariantError: something leaked, is owned twice, or is out of order.
        """
        running, lingering = list(self._running.values()), self._lingering
        self._pool.check_integrity([request.blocks for request in (*running, *lingering)])
        check_blocks(running, lingering, self._limits)
        admitted = [*running, *self._swapped.values(), *lingering]
        check_slots(admitted, self._free_slots, self._limits.max_num_seqs)
        check_requests(running, list(self._swapped.values()), list(self._waiting.values()))
        in_flight = [request for step in self._in_flight for request in step.requests]
        check_in_flight(admitted, lingering, in_flight)

    # Requests in

    def _bring_back(self, draft: PlanDraft) -> None:
        while head := self._returning():
            request, needed = head
            turn = self._budget.turn(request, draft.rows_left)
            if turn is None:
                return
            turn, saved = self._memory.fit_drafts(turn), request.held_save
            needed = max(needed, self._memory.lacking(turn))
            draft.assign_blocks(request, self._pool.allocate(needed))
            in_use = tuple(request.blocks[: saved.num_blocks])
            draft.swap_ins.append(SwapIn(request.held_slot, in_use, saved.key))
            request.saved = None
            self._move(request, self._swapped, self._running, Status.RUNNING)
            draft.add_turn(turn)

    def _admit(self, draft: PlanDraft) -> None:
        while head := self._admissible():
            request, cached = head
            num_cached = len(cached) * self._limits.block_size
            chunk = self._budget.chunk(request, num_cached)
            if chunk > draft.rows_left:
                return
            if self._memory.looks_up(request):
                self.prefix_cache_queries += request.prompt_len
                self.prefix_cache_hits += num_cached
            request.slot = self._free_slots.pop()
            request.num_cached = request.position = num_cached
            self._pool.share(cached)
            turn = Turn(request, chunk, 0)
            own = self._pool.allocate(self._memory.lacking(turn) - len(cached))
            draft.admit(request)
            draft.assign_blocks(request, [*cached, *own])
            self._move(request, self._waiting, self._running, Status.RUNNING)
            draft.add_turn(turn)

    def _returning(self) -> tuple[RequestState, int] | None:
        """The oldest swapped request and the blocks it needs, if it can run and they are there."""
        if not self._swapped:
            return None
        request = min(self._swapped.values(), key=lambda request: request.arrival)
        turn = self._budget.least_turn(request)
        if turn is None:
            return None
        needed = max(self._memory.lacking(turn), request.held_save.num_blocks)
        return (request, needed) if needed <= self._pool.num_available else None

    def _admissible(self) -> tuple[RequestState, tuple[int, ...]] | None:
        """The oldest waiting request and its cached blocks, if a slot and its prompt's KV fit."""
        if self._swapped or not self._waiting or not self._free_slots:
            return None
        request = next(iter(self._waiting.values()))
        cached = self._memory.cached_prefix(request)
        return (request, cached) if self._memory.fits_prompt(request, cached) else None

    # Turns

    def _choose_turns(self, draft: PlanDraft) -> list[Turn]:
        """Share the row budget among running requests, as far as blocks can be had."""
        able: list[RequestState] = []
        for request in self._running.values():
            turn = self._budget.least_turn(request)
            if turn is None:
                continue
            if self._victims(turn) is None:
                draft.short_of_blocks = True
            else:
                able.append(request)
        decodes = [request for request in able if not request.prefilling]
        prefills = [request for request in able if request.prefilling]
        reserved = self._reserved_rows(prefills, bool(decodes), draft)
        return self._budget.share(decodes, prefills, reserved)

    def _reserved_rows(
        self, prefills: list[RequestState], any_decodes: bool, draft: PlanDraft
    ) -> int:
        """Rows that decoding requests must leave to whoever is next to prefill or to come in."""
        if prefills:
            reserved = self._budget.chunk(prefills[0], prefills[0].position)
        elif draft.short_of_blocks:
            reserved = 0
        else:
            reserved = self._incoming_rows()
        if not any_decodes or reserved < draft.rows_left:
            return reserved
        # A chunk that fills a whole step alternates with decoding.
        self._decodes_yield = not self._decodes_yield
        return reserved if self._decodes_yield else 0

    def _incoming_rows(self) -> int:
        """Rows that the next request to return or to be admitted must have."""
        if returning := self._returning():
            request = returning[0]
            return self._budget.chunk(request, request.position) if request.prefilling else 1
        if admissible := self._admissible():
            request, cached = admissible
            return self._budget.chunk(request, len(cached) * self._limits.block_size)
        return 0

    def _grant(self, turn: Turn, draft: PlanDraft) -> None:
        """Give a running request its turn if blocks can be had, at younger ones' cost."""
        request = turn.request
        if request.status is not Status.RUNNING:
            return
        turn = self._memory.fit_drafts(turn)
        victims = self._victims(turn)
        if victims is None:
            draft.short_of_blocks = True
            return
        for victim in victims:
            self._swap_out(victim, draft)
        draft.assign_blocks(request, self._pool.allocate(self._memory.lacking(turn)))
        draft.add_turn(turn)

    def _launch(self, draft: PlanDraft) -> StepPlan:
        plan = draft.build(tuple(self._discarded))
        self._discarded.clear()
        for turn, row in zip(draft.turns, plan.rows, strict=True):
            request = turn.request
            request.num_in_flight += 1
            request.last_step = plan.step_id
            if request.prefilling:
                start = request.position
                request.position += turn.num_query
                # The next plan is the first to match these; the device has them by then.
                self._memory.index_chunk(request, start, request.position)
            if row.samples:
                request.bound = request.bound.after_launch(row.draft_limit)
        requests = tuple(turn.request for turn in draft.turns)
        self._in_flight.append(_StepInFlight(plan, requests))
        self._next_step_id += 1
        return plan

    # Memory

    def _victims(self, turn: Turn) -> list[RequestState] | None:
        """Whom a running request's turn would cost their blocks; None if it cannot be had."""
        lacking = self._memory.lacking(turn)
        return self._memory.victims(turn.request, lacking, reversed(self._running.values()))

    def _swap_out(self, victim: RequestState, draft: PlanDraft) -> None:
        slot, num_saved = victim.held_slot, self._limits.blocks_for(victim.reach)
        # Unique for ever: an id may come back while a former key waits to be discarded.
        victim.saved = SavedKV(f"{victim.request.request_id}@{draft.step_id}", num_saved)
        in_use = tuple(victim.blocks[:num_saved])
        draft.swap_outs.append(SwapOut(slot, in_use, victim.saved.key))
        self._pool.release(victim.blocks)
        victim.blocks.clear()
        self._move(victim, self._running, self._swapped, Status.SWAPPED)
        draft.short_of_blocks = True

    def _free_settled(self) -> None:
        """Take back what released requests hold, once no step in flight uses it."""
        lingering: list[RequestState] = []
        for request in self._lingering:
            if request.num_in_flight:
                lingering.append(request)
                continue
            self._pool.release(request.blocks)
            if request.saved is not None:
                self._discarded.append(request.saved.key)
            if request.slot is not None:
                self._free_slots.append(request.slot)
        self._lingering = lingering

    # Results

    def _settle_row(
        self, request: RequestState, row: PlanRow, result: RowResult
    ) -> RequestUpdate | None:
        request.num_in_flight -= 1
        if result.poisoned:
            # What a released request has left to others is no better.
            self._memory.forget(request)
        if request.status is Status.RELEASED:
            return None
        if result.poisoned:
            self.release(request.request.request_id)
            return poisoned_update(request, row, result)
        return settled_update(request, row, result)

    @staticmethod
    def _move(
        request: RequestState,
        source: dict[str, RequestState],
        target: dict[str, RequestState],
        status: Status,
    ) -> None:
        request_id = request.request.request_id
        target[request_id] = source.pop(request_id)
        request.status = status

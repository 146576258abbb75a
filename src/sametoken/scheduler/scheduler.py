"""Plan steps ahead of the device; settle their results in step order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sametoken.errors import InvariantError, RequestError
from sametoken.scheduler.integrity import (
    check_blocks,
    check_in_flight,
    check_requests,
    check_slots,
)
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import PlanDraft, RowBudget, Turn
from sametoken.scheduler.request_state import (
    RequestState,
    SavedKV,
    Status,
    failed_update,
    update_of,
)
from sametoken.types.length_bound import LenBound
from sametoken.types.outputs import (
    RequestResult,
    StepResult,
)
from sametoken.types.plan import (
    ScheduledRequest,
    StepPlan,
    SwapIn,
    SwapOut,
)
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    plan: StepPlan
    requests: tuple[RequestState, ...]


class Scheduler:
    """Decides who runs in each step and who owns which slot and block.

    Requests are older or younger by their admission, and those that wait for it by arrival.
    Every running request is older than every swapped one; older ones are served first wherever
    memory is short. ``RowBudget`` shares out the rows of a step.

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
        # All by request id; ``_running`` is in order of age, ``_waiting`` in that of arrival.
        self._waiting: dict[str, RequestState] = {}
        self._running: dict[str, RequestState] = {}
        self._swapped: dict[str, RequestState] = {}
        # Released, with steps in flight that still use their slots and blocks.
        self._lingering: list[RequestState] = []
        self._discarded: list[str] = []
        self._in_flight: deque[_StepInFlight] = deque()
        self._next_step_id = 0
        self._next_admission = 0

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
            block_keys=self._memory.keys(request),
            bound=LenBound.known(len(request.prompt_token_ids)),
        )

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
        self._free_processed()

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be launched now.

        A plan without rows only discards swapped KV; it is settled like any other.
        """
        draft = PlanDraft(self._next_step_id)
        # Oldest first, so that those who lose their blocks have had no turn in this plan.
        for turn in self._budget.share(draft.step_id, self._candidates(draft)):
            if turn.request.status is Status.RUNNING:
                self._grant(turn, draft)
            elif not draft.short_of_blocks:
                self._let_in(turn, draft)
        if not draft.turns and not self._discarded:
            return None
        return self._launch(draft)

    def process_output(self, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Learn the verdict of the oldest step in flight.

        Raises:
            InvariantError: the result is of another step, or does not fit the plan.
        """
        if not self._in_flight or self._in_flight[0].plan.step_id != result.step_id:
            expected = self._in_flight[0].plan.step_id if self._in_flight else "none"
            raise InvariantError(f"result of step {result.step_id} arrived, expected {expected}")
        step = self._in_flight[0]
        if len(result.requests) != len(step.requests):
            raise InvariantError(
                f"result of step {result.step_id} has {len(result.requests)} rows, "
                f"its plan {len(step.requests)}"
            )
        self._in_flight.popleft()
        updates = [
            self._process_row(request, row, row_result)
            for request, row, row_result in zip(
                step.requests, step.plan.requests, result.requests, strict=True
            )
        ]
        self._free_processed()
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

    # Turns

    def _candidates(self, draft: PlanDraft) -> list[RequestState]:
        """Who could run in the next step, oldest first."""
        able: list[RequestState] = []
        for request in self._running.values():
            if request.at_limit:
                continue
            if self._lacks_blocks(request) and request is self._youngest:
                draft.short_of_blocks = True
            else:
                able.append(request)
        if not draft.short_of_blocks:
            able += self._returning() if self._swapped else self._admissible()
        return able

    def _returning(self) -> list[RequestState]:
        """The oldest swapped request, if it can run; one a step, so none passes an older one."""
        oldest = min(self._swapped.values(), key=lambda request: request.admission)
        return [oldest] if self._may_return(oldest) else []

    def _may_return(self, request: RequestState) -> bool:
        """Whether a swapped request can run, and there are blocks for its KV."""
        needed = self._memory.blocks_to_return(Turn(request, 1, 0))
        return not request.at_limit and needed <= self._pool.num_available

    def _admissible(self) -> Iterator[RequestState]:
        """Waiting requests that have a slot, up to the first whose prompt's KV has no room.

        Whoever overtakes another one leaves it a slot.
        """
        for request in islice(self._waiting.values(), len(self._free_slots)):
            cached = self._memory.cached_prefix(request)
            if not self._memory.fits_prompt(request, cached):
                return
            request.num_cached = request.position = len(cached) * self._limits.block_size
            yield request

    def _grant(self, turn: Turn, draft: PlanDraft) -> None:
        """Give a running request its turn if blocks can be had, at younger ones' cost."""
        request = turn.request
        while self._lacks_blocks(request):
            if request is self._youngest:
                draft.short_of_blocks = True
                return
            self._swap_out(self._youngest, draft)
        turn = self._memory.fit(turn)
        draft.assign_blocks(request, self._pool.allocate(self._memory.lacking(turn)))
        draft.turns.append(turn)

    def _let_in(self, turn: Turn, draft: PlanDraft) -> None:
        """Bring a swapped request back, or admit a waiting one, unless its blocks have gone."""
        is_swapped = turn.request.status is Status.SWAPPED
        came = self._bring_back(turn, draft) if is_swapped else self._admit(turn, draft)
        draft.short_of_blocks = not came

    def _bring_back(self, turn: Turn, draft: PlanDraft) -> bool:
        request = turn.request
        if not self._may_return(request):
            return False
        turn, saved = self._memory.fit(turn), request.held_save
        draft.assign_blocks(request, self._pool.allocate(self._memory.blocks_to_return(turn)))
        in_use = tuple(request.blocks[: saved.num_blocks])
        draft.swap_ins.append(SwapIn(request.held_slot, in_use, saved.key))
        request.saved = None
        self._move(request, self._swapped, self._running, Status.RUNNING)
        draft.turns.append(turn)
        return True

    def _admit(self, turn: Turn, draft: PlanDraft) -> bool:
        request = turn.request
        # Blocks that were cached when turns were shared out may be somebody's by now.
        cached = self._memory.cached_prefix(request)
        if not self._memory.fits_prompt(request, cached):
            return False
        num_cached = len(cached) * self._limits.block_size
        if self._memory.looks_up(request):
            self.prefix_cache_queries += request.prompt_len
            self.prefix_cache_hits += num_cached
        request.slot = self._free_slots.pop()
        request.admission = self._next_admission
        self._next_admission += 1
        request.num_cached = request.position = num_cached
        self._pool.share(cached)
        own = self._pool.allocate(self._memory.lacking(turn) - len(cached))
        draft.admit(request)
        draft.assign_blocks(request, [*cached, *own])
        self._move(request, self._waiting, self._running, Status.RUNNING)
        draft.turns.append(turn)
        return True

    def _launch(self, draft: PlanDraft) -> StepPlan:
        plan = draft.build(tuple(self._discarded))
        self._discarded.clear()
        for turn, row in zip(draft.turns, plan.requests, strict=True):
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

    @property
    def _youngest(self) -> RequestState:
        return next(reversed(self._running.values()))

    def _lacks_blocks(self, request: RequestState) -> bool:
        """Whether the next row of a running request needs more blocks than are available."""
        return self._memory.lacking(Turn(request, 1, 0)) > self._pool.num_available

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

    def _free_processed(self) -> None:
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

    def _process_row(
        self, request: RequestState, row: ScheduledRequest, result: RequestResult
    ) -> RequestUpdate | None:
        request.num_in_flight -= 1
        if result.failed:
            # What a released request has left to others is no better.
            self._memory.forget(request)
        if request.status is Status.RELEASED:
            return None
        if result.failed:
            self.release(request.request.request_id)
            return failed_update(request, row, result)
        return update_of(request, row, result)

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

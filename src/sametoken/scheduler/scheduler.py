"""The scheduler: plans steps ahead of the device and processes results in step order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sametoken.errors import InvariantError, RequestError
from sametoken.scheduler.block_pool import BlockPool
from sametoken.scheduler.integrity import check_blocks, check_in_flight, check_requests, check_slots
from sametoken.scheduler.kept_states import KeptStates
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import PlanDraft, RowBudget, Turn
from sametoken.scheduler.request_state import RequestState, Status, failed_update, update_of
from sametoken.scheduler.swap_space import NO_FILE, BlockFile, SwapSpace
from sametoken.types.length_bound import LenBound
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.plan import ScheduledRequest, StepPlan
from sametoken.types.request import EngineRequest, RequestUpdate


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    plan: StepPlan
    requests: tuple[RequestState, ...]


class Scheduler:
    """Assigns rows, slots and KV blocks to requests, step by step.

    Age is the order of admission, or of arrival for waiting requests. Every running request is
    older than every swapped one; older requests go first when memory is short. ``RowBudget``
    divides the rows of a step.

    Args:
        limits: the limits of every plan; an attribute too.
        file: where blocks in host memory move on to.

    Attributes:
        num_preemptions: requests swapped out, each time.
        weight_version: of the target's weights that later steps run with.
        prefix_cache_queries: prompt tokens of admitted requests that were looked up.
        prefix_cache_hits: prompt tokens of them that the prefix cache supplied.
        swapped_prefix_hits: those of them that came from swap space.
        admits: whether waiting requests may begin.
    """

    def __init__(self, limits: SchedulerLimits, file: BlockFile = NO_FILE) -> None:
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.swapped_prefix_hits = 0
        self.num_preemptions = 0
        self.weight_version = 0
        self.admits = True
        self.limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._states = KeptStates(limits)
        self._swap = SwapSpace(limits.num_host_blocks, limits.num_idle_host_blocks, file)
        self._memory = KVMemory(limits, self._pool, self._states, self._swap)
        self._budget = RowBudget(limits)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        # By request id; running ones are ordered by age, waiting ones by arrival. A plain dict
        # would look past all that were admitted before to find the first that waits.
        self._of: dict[Status, OrderedDict[str, RequestState]] = {
            status: OrderedDict() for status in Status
        }
        self._waiting = self._of[Status.WAITING]
        self._running = self._of[Status.RUNNING]
        self._swapped = self._of[Status.SWAPPED]
        # Released; steps in flight still use their slots and blocks.
        self._lingering: list[RequestState] = []
        self._in_flight: deque[_StepInFlight] = deque()
        self._next_step_id = 0
        self._next_admission = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to plan or process, released requests' steps included."""
        return bool(self._waiting or self._running or self._swapped or self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and KV blocks and are not released."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that are not admitted yet."""
        return sum(request.prompt_len for request in self._waiting.values())

    @property
    def num_swapped(self) -> int:
        """Preempted requests, which have no KV on the device."""
        return len(self._swapped)

    @property
    def adapters_in_use(self) -> set[int]:
        """The adapters of unfinished requests."""
        return {one.request.adapter for held in self._of.values() for one in held.values()}

    @property
    def swap_usage(self) -> float:
        """Fraction of the host blocks in use, 0..1."""
        return self._swap.usage

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks that requests hold, 0..1, without unreferenced cached blocks."""
        return self._pool.num_referenced / self._pool.num_blocks

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run, or its id is in use.
        """
        for requests in self._of.values():
            if request.request_id in requests:
                raise RequestError(
                    f"request {request.request_id!r} already exists", "choose another request id"
                )
        self.limits.require_possible(request)
        self._waiting[request.request_id] = RequestState(
            request=request,
            block_keys=self._memory.keys(request),
            bound=LenBound.known(len(request.prompt_token_ids)),
            weight_versions=(self.weight_version, self.weight_version),
            num_updates=self._memory.num_updates,
            fast_form=self.limits.fast_form,
        )

    def begin_weights(self, version: int) -> None:
        """All later steps run with other weights, of a larger version.

        No later request reads KV of older weights; those that have begun keep theirs.

        Raises:
            InvariantError: steps are in flight, or the version is not larger.
        """
        if self._in_flight or version <= self.weight_version:
            raise InvariantError(f"weights of version {version} after {self.weight_version}")
        self.weight_version = version
        for request in (*self._running.values(), *self._swapped.values()):
            request.weight_versions = (request.weight_versions[0], version)
        self._begin_kv()

    def begin_drafter_weights(self) -> None:
        """All later steps draft with other weights; no later request reads KV of older ones.

        Raises:
            InvariantError: steps are in flight.
        """
        if self._in_flight:
            raise InvariantError("a drafter's weights change under steps in flight")
        self._begin_kv()

    def _begin_kv(self) -> None:
        """Requests that have not begun read no KV of older weights."""
        self._memory.begin_weights()
        for request in self._waiting.values():
            request.weight_versions = (self.weight_version, self.weight_version)
            request.num_updates = self._memory.num_updates
            request.block_keys = self._memory.keys(request.request)

    def forget_prefixes(self) -> None:
        """No later request reads KV of blocks that are free now; prefixes in swap space stay."""
        self._pool.forget_prefixes()

    def release(self, request_id: str, num_kept_tokens: int | None = None) -> None:
        """Remove a request that is finished or aborted; unknown ids are ignored.

        No later plan includes it. It keeps its slot and blocks until its steps in flight are
        processed, which gives no more updates.

        Args:
            request_id: the request.
            num_kept_tokens: tokens of prompt and output that the caller kept when it cut the
                updates at a stop; their blocks may be cached. None caches no emitted tokens.

        Raises:
            InvariantError: ``num_kept_tokens`` is out of range.
        """
        request = None
        for requests in self._of.values():
            request = request or requests.pop(request_id, None)
        if request is None:
            return
        request.status = Status.RELEASED
        self._lingering.append(request)
        if num_kept_tokens is not None:
            self._memory.index_kept(request, num_kept_tokens)
        self._states.release(request)
        self._free_processed()

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be launched now.

        Without steps in flight it waits for KV that is read from the file.
        """
        plan = self._plan()
        while not self._in_flight and self._swap.is_moving:
            self._swap.wait()
            plan = self._plan()
        return plan

    def _plan(self) -> StepPlan | None:
        draft = PlanDraft(self._next_step_id)
        self._swap.begin(draft.step_id)
        # Oldest first, so that requests that are swapped out have no turn in this plan yet.
        for turn in self._budget.share(draft.step_id, self._candidates(draft)):
            if turn.request.status is Status.RUNNING:
                self._schedule_running(turn, draft)
            elif not draft.short_of_blocks:
                self._schedule_new(turn, draft)
        if not draft.turns and not draft.swap_outs:
            return None
        return self._launch(draft)

    def process_output(self, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Process the result of the oldest step in flight.

        Raises:
            InvariantError: the result belongs to another step, or does not fit the plan.
        """
        expected = self._in_flight[0].plan.step_id if self._in_flight else "none"
        if result.step_id != expected:
            raise InvariantError(f"result of step {result.step_id} arrived, expected {expected}")
        step = self._in_flight[0]
        if len(result.requests) != len(step.requests):
            raise InvariantError(
                f"result of step {result.step_id} has {len(result.requests)} requests, "
                f"its plan {len(step.requests)}"
            )
        self._in_flight.popleft()
        self._swap.processed(result.step_id)
        updates = [
            self._process_request(request, scheduled, request_result)
            for request, scheduled, request_result in zip(
                step.requests, step.plan.requests, result.requests, strict=True
            )
        ]
        self._free_processed()
        return tuple(update for update in updates if update is not None)

    def check_integrity(self) -> None:
        """Check slots, blocks and lists against each other.

        Raises:
            InvariantError: a slot or block leaked or is owned twice, or a list is wrong.
        """
        running, lingering = list(self._running.values()), self._lingering
        self._pool.check_integrity([request.blocks for request in (*running, *lingering)])
        check_blocks(running, lingering, self.limits)
        admitted = [*running, *self._swapped.values(), *lingering]
        check_slots(admitted, self._free_slots, self.limits.max_num_seqs)
        self._states.check_integrity(admitted)
        check_requests(running, list(self._swapped.values()), list(self._waiting.values()))
        in_flight = [request for step in self._in_flight for request in step.requests]
        check_in_flight(admitted, lingering, in_flight)

    # Turns

    def _candidates(self, draft: PlanDraft) -> list[RequestState]:
        """Requests that could run in the next step, oldest first."""
        ready: list[RequestState] = []
        youngest = self._youngest if self._running else None
        for request in self._running.values():
            self._memory.drop_behind(request)
            if request.at_limit:
                continue
            if request is youngest and self._memory.lacks_blocks(request):
                draft.short_of_blocks = True
            else:
                ready.append(request)
        if not draft.short_of_blocks:
            ready += self._swapped_in_next() if self._swapped else self._admissible()
        return ready

    def _swapped_in_next(self) -> list[RequestState]:
        """The oldest swapped request if it can run: one per step keeps them in order."""
        oldest = min(self._swapped.values(), key=lambda request: request.admission)
        return [oldest] if self._can_swap_in(oldest) else []

    def _can_swap_in(self, request: RequestState) -> bool:
        return not request.at_limit and self._memory.may_return(request)

    def _admissible(self) -> Iterator[RequestState]:
        """Waiting requests for free slots, up to the first whose prompt does not fit in KV memory,
        or whose prefix is still read from the file.

        There are no more of them than free slots, so one that is overtaken keeps a slot.
        """
        for request in islice(self._waiting.values(), len(self._free_slots) if self.admits else 0):
            if self._memory.find_prefix(request) is None:
                return
            yield request

    def _schedule_running(self, turn: Turn, draft: PlanDraft) -> None:
        """Schedule a running request, swapping out younger ones if blocks are short."""
        request, lacking = turn.request, self._memory.lacking(turn)
        if lacking > self._pool.num_available:
            while self._memory.lacks_blocks(request):
                if request is self._youngest:
                    draft.short_of_blocks = True
                    return
                self._swap_out(self._youngest, draft)
            turn = self._memory.fit(turn)
            lacking = self._memory.lacking(turn)
        if lacking:
            self._memory.extend(request, lacking, draft)
        draft.turns.append(turn)

    def _schedule_new(self, turn: Turn, draft: PlanDraft) -> None:
        """Swap in a swapped request or admit a waiting one, if blocks are still available."""
        is_swapped = turn.request.status is Status.SWAPPED
        scheduled = self._swap_in(turn, draft) if is_swapped else self._admit(turn, draft)
        draft.short_of_blocks = not scheduled

    def _swap_in(self, turn: Turn, draft: PlanDraft) -> bool:
        request = turn.request
        if not self._can_swap_in(request):
            return False
        turn = self._memory.fit(turn)
        self._memory.swap_in(request, turn, draft)
        self._move(request, Status.RUNNING)
        draft.turns.append(turn)
        return True

    def _admit(self, turn: Turn, draft: PlanDraft) -> bool:
        request = turn.request
        # Matched again: earlier turns may have evicted blocks since the rows were divided.
        cached = self._memory.find_prefix(request)
        if cached is None:
            return False
        turn = turn.cut(min(turn.num_query, request.num_left))
        if not turn.num_query:
            return False
        if self._memory.looks_up(request):
            self.prefix_cache_queries += request.prompt_len
            self.prefix_cache_hits += request.num_cached
            self.swapped_prefix_hits += len(cached.saved) * self.limits.block_size
        request.slot = self._free_slots.pop()
        request.admission = self._next_admission
        self._next_admission += 1
        draft.admit(request)
        self._memory.assign_prefix(request, cached, draft)
        self._memory.extend(request, self._memory.lacking(turn), draft)
        draft.restored_states += self._states.restored(request)
        self._move(request, Status.RUNNING)
        draft.turns.append(turn)
        return True

    def _launch(self, draft: PlanDraft) -> StepPlan:
        wanted = self._budget.num_wanted(draft.turns)
        plan = draft.build(self._states.kept_after(draft.turns), wanted)
        for turn, scheduled in zip(draft.turns, plan.requests, strict=True):
            request = turn.request
            request.num_in_flight += 1
            request.last_step = plan.step_id
            if request.prefilling:
                start = request.position
                request.position += turn.num_query
                # The next plan is the first to match these; the device has them by then.
                self._memory.index_chunk(request, start, request.position)
            if scheduled.samples:
                request.bound = request.bound.after_launch(scheduled.draft_limit)
        requests = tuple(turn.request for turn in draft.turns)
        self._in_flight.append(_StepInFlight(plan, requests))
        self._next_step_id += 1
        return plan

    # Memory

    @property
    def _youngest(self) -> RequestState:
        return next(reversed(self._running.values()))

    def _swap_out(self, victim: RequestState, draft: PlanDraft) -> None:
        self._memory.swap_out(victim, draft)
        self.num_preemptions += 1
        self._move(victim, Status.SWAPPED)
        draft.short_of_blocks = True

    def _free_processed(self) -> None:
        """Free what released requests hold once no step in flight uses it."""
        lingering: list[RequestState] = []
        for request in self._lingering:
            if request.num_in_flight:
                lingering.append(request)
                continue
            self._memory.free(request)
            if request.slot is not None:
                self._free_slots.append(request.slot)
        self._lingering = lingering

    # Results

    def _process_request(
        self, request: RequestState, scheduled: ScheduledRequest, result: RequestResult
    ) -> RequestUpdate | None:
        request.num_in_flight -= 1
        if result.failed and not result.mask_fault:
            # NaN: its cached KV is wrong too, even that of a released request.
            self._memory.forget(request)
        if request.status is Status.RELEASED:
            return None
        if result.failed:
            self.release(request.request.request_id)
            return failed_update(request, scheduled, result)
        return update_of(request, scheduled, result)

    def _move(self, request: RequestState, status: Status) -> None:
        request_id = request.request.request_id
        self._of[status][request_id] = self._of[request.status].pop(request_id)
        request.status = status

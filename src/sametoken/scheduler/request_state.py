"""The host's state of one request, and its update from a step's result."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sametoken.errors import InvariantError
from sametoken.scheduler.draft_limits import DraftRecord
from sametoken.scheduler.swap_space import Key
from sametoken.types.fast_prompts import NO_FAST_FORM, FastForm
from sametoken.types.length_bound import LenBound
from sametoken.types.outputs import RequestResult
from sametoken.types.plan import ScheduledRequest
from sametoken.types.request import EngineRequest, RequestUpdate


class Status(enum.Enum):
    """The scheduling status of a request. A swapped request is preempted; it keeps its slot."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class RequestState:
    """The mutable state of one request.

    Attributes:
        request: the request as queued.
        block_keys: prefix cache keys of the prompt's blocks, once it has ended of all kept ones.
        bound: bounds of the number of committed tokens.
        slot: its slot once it is admitted.
        blocks: its block table, from index ``num_dropped`` on.
        num_dropped: blocks before these, which no later row sees; they are free again.
        admission: order of admission; a smaller number is older.
        num_cached: prompt positions that the prefix cache supplied, or would supply.
        position: prompt positions that are cached or planned; while it replays, positions that
            are planned again.
        num_replayed: positions that were computed before its KV was lost: it replays them first.
        chunk_ends: positions of the prompt at which a chunk must end, ascending.
        held_states: kept states of the answer by position, while the request runs.
        num_in_flight: steps in flight that schedule it.
        last_step: the last planned step that schedules it.
        saved: keys of its blocks in swap space while it is swapped; none if they are lost.
        drafts: acceptance of its drafts.
        emitted: output tokens of processed steps, not cut at a stop or at the length limit.
        weight_versions: of the weights of its first step, and of its newest.
        num_updates: before its first step, as in ``KVMemory``.
        fast_form: as in ``SchedulerLimits``.
        prompt_len: tokens of the prompt.
        fast_end: positions of it that run in the fast form.
    """

    request: EngineRequest
    block_keys: tuple[bytes, ...]
    bound: LenBound
    status: Status = Status.WAITING
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_dropped: int = 0
    admission: int = -1
    num_cached: int = 0
    position: int = 0
    chunk_ends: tuple[int, ...] = ()
    held_states: dict[int, int] = field(default_factory=dict)
    num_in_flight: int = 0
    last_step: int = 0
    saved: tuple[Key, ...] = ()
    num_replayed: int = 0
    drafts: DraftRecord = field(default_factory=DraftRecord)
    emitted: list[int] = field(default_factory=list)
    weight_versions: tuple[int, int] = (0, 0)
    num_updates: int = 0
    fast_form: FastForm = NO_FAST_FORM
    prompt_len: int = field(init=False)
    fast_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self.fast_end = self.fast_form.end(self.prompt_len)

    @property
    def replays(self) -> bool:
        """Whether its next rows were computed before."""
        return self.position < self.num_replayed

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not yet planned, or part of what it replays."""
        return self.position < self.prompt_len or self.position < self.num_replayed

    @property
    def num_left(self) -> int:
        """Tokens of the prompt, or of what it replays, not yet planned, up to a chunk's end."""
        end = self.num_replayed if self.replays else self.prompt_len
        ends = (*self.chunk_ends, self.fast_end)
        return min((one for one in ends if self.position < one < end), default=end) - self.position

    @property
    def least_query(self) -> int:
        """Tokens of its shortest turn; a chunk that does not end what is left has multiples."""
        return max(1, min(self.fast_form.multiple, self.fast_end - self.position))

    def expanded_to(self, num_query: int) -> int:
        """Positions that a chunk from here on sees if its latents are expanded; 0: they are not."""
        expanded = self.fast_form.expands and self.position < self.fast_end
        return self.position + num_query if expanded else 0

    @property
    def at_limit(self) -> bool:
        """Whether the steps in flight may already reach ``max_total_tokens``."""
        return self.bound.hi >= self.request.max_total_tokens

    @property
    def next_position(self) -> int:
        """A lower bound of the positions of all rows that are not planned yet."""
        return self.position if self.prefilling else self.bound.lo - 1

    @property
    def table_len(self) -> int:
        """Entries of its block table, dropped ones included."""
        return self.num_dropped + len(self.blocks)

    @property
    def reach(self) -> int:
        """Positions that may hold KV once all steps in flight have run."""
        return self.position if self.prefilling else self.bound.hi

    @property
    def num_processed(self) -> int:
        """Tokens of the prompt and of the output of processed steps."""
        return self.prompt_len + len(self.emitted)

    @property
    def num_final(self) -> int:
        """Leading positions of known tokens whose KV exists once the steps in flight have run.

        In the prompt, and in a replay: the planned positions. In the output: all except the newest
        processed token, whose KV the next window computes; nothing below it is written again
        (tests/unit/scheduler/test_emitted_blocks.py).
        """
        if self.prefilling:
            return self.position
        return self.prompt_len + max(0, len(self.emitted) - 1)

    @property
    def held_slot(self) -> int:
        """The slot of an admitted request.

        Raises:
            InvariantError: the request is not admitted.
        """
        if self.slot is None:
            raise InvariantError(f"request {self.request.request_id!r} has no slot")
        return self.slot

    def lose_kv(self) -> None:
        """Start again at position 0: what was computed is replayed, then it goes on as before.

        Call it without steps in flight.
        """
        computed = self.position if self.prefilling else self.bound.exact - 1
        self.num_replayed = max(self.num_replayed, computed)
        self.position = self.num_dropped = 0

    def most_drafts(self, num_speculative_tokens: int) -> int:
        """Maximum drafts of the next window, before the step's row budget; not ``at_limit``."""
        own = self.request.num_speculative_tokens
        allowed = num_speculative_tokens if own is None else min(own, num_speculative_tokens)
        return min(allowed, self.request.max_total_tokens - self.bound.hi - 1)


def update_of(
    request: RequestState, scheduled: ScheduledRequest, result: RequestResult
) -> RequestUpdate | None:
    """Narrow the request's length bound and record its tokens; None if nothing is to report.

    Raises:
        InvariantError: the result does not fit the scheduled request.
    """
    _require_fit(scheduled, result)
    if scheduled.replays:
        return None
    if scheduled.samples:
        # The end of a prompt does not count: no draft could be proposed for it.
        if request.emitted:
            request.drafts = request.drafts.after(
                result.num_drafts, result.num_proposed, result.num_accepted
            )
        request.bound = request.bound.after_result(scheduled.draft_limit, result.num_accepted)
        request.emitted.extend(result.token_ids)
    elif result.prompt_logprobs is None and result.routed_experts is None:
        return None
    return RequestUpdate(
        request.request.request_id,
        result.token_ids,
        result.num_drafts,
        result.num_accepted,
        scheduled.samples,
        request.num_cached,
        request.weight_versions,
        result.logprobs,
        result.prompt_logprobs,
        result.routed_experts,
    )


def failed_update(
    request: RequestState, scheduled: ScheduledRequest, result: RequestResult
) -> RequestUpdate:
    """The update of a failed request with its cause, without tokens or counts."""
    return RequestUpdate(
        request_id=request.request.request_id,
        token_ids=(),
        num_drafts=0,
        num_accepted=0,
        samples=scheduled.samples,
        num_cached=request.num_cached,
        failed=True,
        mask_fault=result.mask_fault,
        weight_versions=request.weight_versions,
    )


def _require_fit(scheduled: ScheduledRequest, result: RequestResult) -> None:
    limit = scheduled.draft_limit if scheduled.samples else 0
    if not 0 <= result.num_accepted <= result.num_drafts <= limit:
        raise InvariantError(
            f"slot {scheduled.slot} accepted {result.num_accepted} of {result.num_drafts} drafts "
            f"where at most {limit} were planned"
        )
    emitted = result.num_accepted + 1 if scheduled.samples else 0
    if len(result.token_ids) != emitted:
        raise InvariantError(
            f"slot {scheduled.slot} emitted {len(result.token_ids)} tokens, expected {emitted}"
        )

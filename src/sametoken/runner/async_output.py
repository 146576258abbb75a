"""Asynchronous output: a ring of host buffers, and step results read from them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from sametoken.errors import InvariantError, StaleInputsError
from sametoken.ops.step.types import HAS_NAN, NUM_COUNTS, SOUND
from sametoken.runner.routed_experts import NO_EXPERTS, StepExperts
from sametoken.runner.stream import Event
from sametoken.sampling.logprobs import TokenLogprobs
from sametoken.state.upload import to_host
from sametoken.types.outputs import Logprob, PositionLogprobs, RequestResult, StepResult
from sametoken.types.plan import ScheduledRequest, StepPlan
from sametoken.types.structured_outputs import MaskFault


def split_by_owner(
    logprobs: TokenLogprobs | None, num_requests: int
) -> list[tuple[PositionLogprobs, ...] | None]:
    """Positions of each scheduled request, in order; None for requests without any.

    The chosen token comes first, then the requested top tokens.

    Args:
        logprobs: in host memory; None if none are requested.
        num_requests: B, scheduled requests of the step.
    """
    if logprobs is None:
        return [None] * num_requests
    positions: list[list[PositionLogprobs]] = [[] for _ in range(num_requests)]
    columns = (getattr(logprobs, one.name).tolist() for one in fields(logprobs))
    for owner, chosen, logprob, rank, top_ids, top_logprobs, num_top in zip(*columns, strict=True):
        entry: PositionLogprobs = {chosen: Logprob(logprob, rank)}
        for index in range(num_top):
            entry[top_ids[index]] = Logprob(top_logprobs[index], index + 1)
        positions[owner].append(entry)
    return [tuple(entries) or None for entries in positions]


NOT_LANDED = torch.iinfo(torch.int64).min


@dataclass(slots=True)
class HostBuffer:
    """Host memory of one step's result.

    Attributes:
        rows: [max_num_seqs, NUM_COUNTS + k + 1] int64, in the layout of ``StepOps.deliver`` and
            the plan's order; ``NOT_LANDED`` until the copy has landed.
        first_place: index of its first row in the ring.
        logprobs, prompt_logprobs: requested candidates, in host memory.
        experts: of all rows, in host memory, if they are recorded.
        mask_faults: why a grammar allows no token, where the host knows, by place in the plan.
    """

    rows: Tensor
    first_place: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    experts: StepExperts = NO_EXPERTS
    mask_faults: dict[int, MaskFault] = field(default_factory=dict)

    def keep(self, logprobs: TokenLogprobs | None, prompt_logprobs: TokenLogprobs | None) -> None:
        """Enqueue the copy of candidates; None if none are requested."""
        self.logprobs, self.prompt_logprobs = _on_host(logprobs), _on_host(prompt_logprobs)

    def read(self, plan: StepPlan) -> StepResult:
        """The landed result as plain values, in the order of the plan.

        Raises:
            InvariantError: the result has not landed.
            StaleInputsError: the buffer holds another step's result.
        """
        landed = self.rows[: len(plan.requests)].tolist()
        for found in {row[0] for row in landed}:
            _require_result_of(plan.step_id, found)
        logprobs = split_by_owner(self.logprobs, len(landed))
        prompt_logprobs = split_by_owner(self.prompt_logprobs, len(landed))
        candidates = zip(plan.requests, landed, logprobs, prompt_logprobs, strict=True)
        results = [self._result(b, *one) for b, one in enumerate(candidates)]
        return StepResult(plan.step_id, tuple(results))

    def _result(
        self,
        b: int,
        scheduled: ScheduledRequest,
        row: list[int],
        logprobs: tuple[PositionLogprobs, ...] | None,
        prompt_logprobs: tuple[PositionLogprobs, ...] | None,
    ) -> RequestResult:
        """The result of the request at place ``b``, given its row and its candidates."""
        _, num_drafts, num_proposed, num_accepted, fault, *tokens = row
        emitted = tuple(tokens[: num_accepted + 1]) if scheduled.samples else ()
        return RequestResult(
            num_drafts,
            num_proposed,
            num_accepted,
            emitted,
            fault != SOUND,
            _cause(fault, self.mask_faults.get(b)),
            logprobs and logprobs[: len(emitted)],
            prompt_logprobs,
            self.experts.of(b, scheduled, num_accepted),
        )

    def clear(self) -> None:
        """Mark the buffer as empty."""
        self.rows.fill_(NOT_LANDED)
        self.logprobs = self.prompt_logprobs = None
        self.experts = NO_EXPERTS
        self.mask_faults.clear()


def _cause(fault: int, known: MaskFault | None) -> MaskFault:
    return MaskFault.NONE if fault <= HAS_NAN else known or MaskFault(fault - HAS_NAN)


def _on_host(candidates: TokenLogprobs | None) -> TokenLogprobs | None:
    if candidates is None:
        return None
    return TokenLogprobs(*(to_host(getattr(candidates, one.name)) for one in fields(candidates)))


def _require_result_of(step_id: int, found: int) -> None:
    if found == NOT_LANDED:
        raise InvariantError(f"step {step_id} was read while its copy was in flight")
    if found != step_id:
        raise StaleInputsError(f"step {step_id} was answered with the result of step {found}")


@dataclass(slots=True)
class OutputRing:
    """Ring of buffers: one for every step that may be in flight, and one more.

    Attributes:
        rows: [R, NUM_COUNTS + k + 1] int64, all buffers.
    """

    rows: Tensor
    free: deque[HostBuffer]

    @classmethod
    def allocate(
        cls,
        num_buffers: int,
        max_num_seqs: int,
        num_speculative_tokens: int,
        *,
        pinned: bool = False,
    ) -> OutputRing:
        """Allocate buffers for the largest step; a GPU writes directly to pinned ones."""
        shape = (num_buffers * max_num_seqs, NUM_COUNTS + num_speculative_tokens + 1)
        rows = torch.full(shape, NOT_LANDED, dtype=torch.int64, pin_memory=pinned)
        firsts = range(0, shape[0], max_num_seqs)
        return cls(rows, deque(HostBuffer(rows[i : i + max_num_seqs], i) for i in firsts))

    def acquire(self) -> HostBuffer:
        """A buffer without a copy in flight.

        Raises:
            InvariantError: more steps are in flight than the ring has room for.
        """
        if not self.free:
            raise InvariantError("every output buffer has a copy in flight")
        return self.free.popleft()

    def release(self, buffer: HostBuffer) -> None:
        """Return a buffer to the ring."""
        buffer.clear()
        self.free.append(buffer)


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """A step's result in flight; pending outputs are read in step order."""

    plan: StepPlan
    buffer: HostBuffer
    landed: Event
    ring: OutputRing

    def wait(self) -> StepResult:
        """Wait until the result has landed, read it, and free its buffer."""
        self.landed.wait()
        result = self.buffer.read(self.plan)
        self.ring.release(self.buffer)
        return result

    def discard(self) -> None:
        """Free the buffer unread, on ranks whose results are not used."""
        self.ring.release(self.buffer)

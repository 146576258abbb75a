"""Results on their way to the host: a ring of buffers that no two copies share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from sametoken.core.outputs import PositionLogprobs, RowResult, StepResult
from sametoken.core.plan import StepPlan
from sametoken.core.structured_outputs import Stuck
from sametoken.errors import InvariantError, StaleInputsError
from sametoken.kernels.outcome import HAS_NAN, SOUND
from sametoken.runner.outcome import NUM_COUNTS
from sametoken.runner.stream import Event
from sametoken.state.upload import to_host
from sametoken.verification.base import TokenLogprobs
from sametoken.verification.host import split_by_owner

NOT_LANDED = torch.iinfo(torch.int64).min

Logprobs = list[tuple[PositionLogprobs, ...] | None]


@dataclass(frozen=True, slots=True)
class PartLogprobs:
    """Candidates of the rows that one launch computed.

    Attributes:
        first, num_rows: which of the buffer's rows those are.
        logprobs, prompt_logprobs: of the rows that asked, in host memory.
    """

    first: int
    num_rows: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


@dataclass(slots=True)
class HostBuffer:
    """Host memory of one step's verdict.

    Attributes:
        rows: [max_num_seqs, 4 + k + 1] int64, as ``outcome.pack`` lays rows out, at their
            place in the plan; ``NOT_LANDED`` until the copy has landed.
        first_place: where its rows begin among those of the ring.
        parts: candidates, for requests that asked.
        lost: by row, why a grammar allows nothing any more, where the host knows.
    """

    rows: Tensor
    first_place: int = 0
    parts: list[PartLogprobs] = field(default_factory=list)
    lost: dict[int, Stuck] = field(default_factory=dict)

    def copy_from(self, outcome: Tensor, first: int) -> None:
        """Enqueue the copy of [B, 4 + window] to the buffer's rows from ``first`` on."""
        batch, width = outcome.shape
        self.rows[first : first + batch, :width].copy_(outcome, non_blocking=True)

    def keep(
        self,
        num_rows: int,
        first: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: TokenLogprobs | None,
    ) -> None:
        """Enqueue the copy of the candidates of ``num_rows`` rows, if any request asked."""
        if logprobs is not None or prompt_logprobs is not None:
            self.parts.append(
                PartLogprobs(first, num_rows, _on_host(logprobs), _on_host(prompt_logprobs))
            )

    def read(self, plan: StepPlan, order: tuple[int, ...]) -> StepResult:
        """The landed verdict as plain values, in the order of the plan.

        Args:
            plan: the step's plan.
            order: of each plan row, which of the buffer's rows holds it.

        Raises:
            InvariantError: the copy has not landed.
            StaleInputsError: the verdict is another step's.
        """
        landed = self.rows[: len(plan.rows)].tolist()
        for row in landed:
            _require_verdict_of(plan.step_id, row[0])
        logprobs: Logprobs = [None] * len(landed)
        prompt_logprobs: Logprobs = [None] * len(landed)
        for part in self.parts:
            _place(logprobs, part, part.logprobs)
            _place(prompt_logprobs, part, part.prompt_logprobs)
        rows = []
        for b, row in enumerate(plan.rows):
            _, num_drafts, num_accepted, fault, *tokens = landed[order[b]]
            emitted = tuple(tokens[: num_accepted + 1]) if row.samples else ()
            chosen = logprobs[order[b]]
            rows.append(
                RowResult(
                    num_drafts=num_drafts,
                    # Not known where none were let in.
                    num_proposed=num_drafts if row.draft_limit else 1,
                    num_accepted=num_accepted,
                    token_ids=emitted,
                    poisoned=fault != SOUND,
                    stuck=_cause(fault, self.lost.get(order[b])),
                    logprobs=None if chosen is None else chosen[: len(emitted)],
                    prompt_logprobs=prompt_logprobs[order[b]],
                )
            )
        return StepResult(plan.step_id, tuple(rows))

    def clear(self) -> None:
        """Mark the buffer as holding nothing."""
        self.rows.fill_(NOT_LANDED)
        self.parts.clear()
        self.lost.clear()


def _cause(fault: int, lost: Stuck | None) -> Stuck:
    stuck = Stuck(max(fault - HAS_NAN, 0))
    return lost if stuck and lost is not None else stuck


def _on_host(candidates: TokenLogprobs | None) -> TokenLogprobs | None:
    if candidates is None:
        return None
    names = [one.name for one in fields(candidates)]
    return TokenLogprobs(**{name: to_host(getattr(candidates, name)) for name in names})


def _require_verdict_of(step_id: int, found: int) -> None:
    if found == NOT_LANDED:
        raise InvariantError(f"step {step_id} was read while its copy was in flight")
    if found != step_id:
        raise StaleInputsError(f"step {step_id} was answered with the verdict of step {found}")


def _place(values: Logprobs, part: PartLogprobs, candidates: TokenLogprobs | None) -> None:
    if candidates is not None:
        values[part.first : part.first + part.num_rows] = split_by_owner(candidates, part.num_rows)


@dataclass(slots=True)
class OutputRing:
    """Buffers for every step that may be in flight, and one more.

    Attributes:
        rows: [R, 4 + k + 1] int64, of all buffers.
    """

    rows: Tensor
    free: deque[HostBuffer]

    @classmethod
    def allocate(
        cls, num_buffers: int, max_num_seqs: int, max_num_drafts: int, *, pinned: bool = False
    ) -> OutputRing:
        """``num_buffers`` buffers of the largest step's size.

        Pinned, so that a GPU writes them by itself.
        """
        shape = (num_buffers * max_num_seqs, NUM_COUNTS + max_num_drafts + 1)
        rows = torch.full(shape, NOT_LANDED, dtype=torch.int64, pin_memory=pinned)
        firsts = range(0, shape[0], max_num_seqs)
        return cls(rows, deque(HostBuffer(rows[i : i + max_num_seqs], i) for i in firsts))

    def acquire(self) -> HostBuffer:
        """A buffer that no copy in flight uses.

        Raises:
            InvariantError: more steps are in flight than the ring was made for.
        """
        if not self.free:
            raise InvariantError("every output buffer has a copy in flight")
        return self.free.popleft()

    def release(self, buffer: HostBuffer) -> None:
        """Give a read buffer back."""
        buffer.clear()
        self.free.append(buffer)


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """A step's verdict in flight. Pending outputs are read in step order.

    Attributes:
        order: of each plan row, which of the buffer's rows holds it.
    """

    plan: StepPlan
    order: tuple[int, ...]
    buffer: HostBuffer
    landed: Event
    ring: OutputRing

    def wait(self) -> StepResult:
        """Wait until the copy has landed, read it, and free its buffer."""
        self.landed.wait()
        result = self.buffer.read(self.plan, self.order)
        self.ring.release(self.buffer)
        return result

    def discard(self) -> None:
        """Free the buffer unread, for a rank whose results nobody wants."""
        self.ring.release(self.buffer)

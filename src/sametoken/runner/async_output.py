"""Results on their way to the host: a ring of buffers that no two copies share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.core.outputs import PositionLogprobs, RowResult, StepResult
from sametoken.core.plan import StepPlan
from sametoken.errors import InvariantError
from sametoken.runner.stream import Event
from sametoken.state.inputs import StepInputs
from sametoken.verification.base import TokenLogprobs, Verdict
from sametoken.verification.host import split_by_owner

NOT_LANDED = torch.iinfo(torch.int64).min

Logprobs = list[tuple[PositionLogprobs, ...] | None]


@dataclass(slots=True)
class HostBuffer:
    """Host memory of one step's verdict.

    Attributes:
        counts: [max_num_seqs, 3] int64: num_drafts, num_accepted, poisoned per plan row;
            ``NOT_LANDED`` until the copy has landed.
        tokens: [max_num_seqs * (k + 1)] int64, windows side by side in plan order.
        logprobs, prompt_logprobs: candidates, for requests that asked.
    """

    counts: Tensor
    tokens: Tensor
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    @classmethod
    def allocate(cls, max_num_seqs: int, max_num_drafts: int) -> HostBuffer:
        """A buffer for the largest step."""
        counts = torch.full((max_num_seqs, 3), NOT_LANDED, dtype=torch.int64)
        tokens = torch.full((max_num_seqs * (max_num_drafts + 1),), NOT_LANDED, dtype=torch.int64)
        return cls(counts, tokens)

    def copy_from(
        self, x: StepInputs, verdict: Verdict, prompt_logprobs: TokenLogprobs | None
    ) -> None:
        """Enqueue the copy of a verdict; on the device's side of the stream."""
        batch, num_tokens = x.slots.shape[0], verdict.tokens.shape[0]
        columns = (x.num_drafts, verdict.num_accepted, verdict.poisoned.long())
        self.tokens[:num_tokens].copy_(verdict.tokens)
        self.logprobs, self.prompt_logprobs = verdict.logprobs, prompt_logprobs
        self.counts[:batch].copy_(torch.stack(columns, dim=1))

    def read(self, plan: StepPlan) -> StepResult:
        """The landed verdict as plain values.

        Raises:
            InvariantError: the copy has not landed.
        """
        batch = len(plan.rows)
        counts = self.counts[:batch].tolist()
        if any(NOT_LANDED in row for row in counts):
            raise InvariantError(f"step {plan.step_id} was read while its copy was in flight")
        tokens = self.tokens.tolist()
        logprobs = _per_row(self.logprobs, batch)
        prompt_logprobs = _per_row(self.prompt_logprobs, batch)
        rows: list[RowResult] = []
        window = 0
        for b, (row, count) in enumerate(zip(plan.rows, counts, strict=True)):
            num_drafts, num_accepted, poisoned = count
            emitted: tuple[int, ...] = ()
            if row.samples:
                emitted = tuple(tokens[window : window + num_accepted + 1])
                window += num_drafts + 1
            chosen = logprobs[b]
            rows.append(
                RowResult(
                    num_drafts=num_drafts,
                    num_accepted=num_accepted,
                    token_ids=emitted,
                    poisoned=bool(poisoned),
                    logprobs=None if chosen is None else chosen[: len(emitted)],
                    prompt_logprobs=prompt_logprobs[b],
                )
            )
        return StepResult(plan.step_id, tuple(rows))

    def clear(self) -> None:
        """Mark the buffer as holding nothing."""
        self.counts.fill_(NOT_LANDED)
        self.logprobs = self.prompt_logprobs = None


def _per_row(logprobs: TokenLogprobs | None, batch: int) -> Logprobs:
    return [None] * batch if logprobs is None else split_by_owner(logprobs, batch)


@dataclass(slots=True)
class OutputRing:
    """Buffers for every step that may be in flight, and one more."""

    free: deque[HostBuffer] = field(default_factory=deque)

    @classmethod
    def allocate(cls, num_buffers: int, max_num_seqs: int, max_num_drafts: int) -> OutputRing:
        """``num_buffers`` buffers of the largest step's size."""
        buffers = (HostBuffer.allocate(max_num_seqs, max_num_drafts) for _ in range(num_buffers))
        return cls(deque(buffers))

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
    """A step's verdict in flight. Pending outputs are read in step order."""

    plan: StepPlan
    buffer: HostBuffer
    landed: Event
    ring: OutputRing

    def wait(self) -> StepResult:
        """Wait until the copy has landed, read it, and free its buffer."""
        self.landed.wait()
        result = self.buffer.read(self.plan)
        self.ring.release(self.buffer)
        return result

"""What a drafter may read after a commit, in the compact layout of an eager step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from sametoken.kernels.interface import AttentionRows
from sametoken.models.base import HiddenStates
from sametoken.state.inputs import StepInputs
from sametoken.state.sequences import Sequences

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Rows that a drafter with KV of its own has to run. T rows, B plan rows.

    Attributes:
        slots, positions: [T] int64, where the rows stand.
        computed: [T] bool, whether the row is below ``end``. The newest token is not: the next
            step's rows start with it again.
        source: [T] int64, each row's flat row in the step's hidden states; for the newest
            token, which the target has not run, any valid one.
        last: [B] int64, which of the T rows is each plan row's last.
        window: rows per plan row if it is the same for all.
    """

    slots: Tensor
    positions: Tensor
    computed: Tensor
    source: Tensor
    last: Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class Chains:
    """The plan rows that go on to a next window, and where their drafts start.

    Attributes:
        owner: [R] int64, plan rows.
        slots: [R] int64.
        end: [R] int64, the position of the newest committed token.
    """

    owner: Tensor
    slots: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Copies and derived lengths of one step's plan rows.

    The step computed positions ``start .. end - 1`` of each plan row for good: ``start`` is
    what was computed before, ``end`` what is computed now. Rejected rows lie at ``end`` and
    above and are not among the live rows. The true token at ``end`` exists for every row:
    the next prompt token inside a prompt, the token just sampled otherwise.

    Attributes:
        x: the step's inputs.
        hidden: the target's hidden states of the step's flat rows.
        start: [B] int64.
        end: [B] int64; ``end == num_tokens - 1`` for rows that sample.
        num_tokens: [B] int64, committed tokens after the step.
    """

    x: StepInputs
    hidden: HiddenStates
    start: Tensor
    end: Tensor
    num_tokens: Tensor
    _sequences: Sequences = field(repr=False)

    @property
    def slots(self) -> Tensor:
        """[B] int64, slots of the plan rows."""
        return self.x.slots

    @property
    def samples(self) -> Tensor:
        """[B] bool, rows whose request goes on to a next window."""
        return self.x.samples

    @property
    def max_num_drafts(self) -> int:
        """k."""
        return self._sequences.max_num_drafts

    def live_rows(self) -> Tensor:
        """Indices of the flat rows that were committed: positions ``start .. end - 1``."""
        return (self.x.rows.positions < self.end[self.x.row_owner]).nonzero().squeeze(1)

    def catch_up(self) -> CatchUp:
        """The live rows: positions ``start .. end - 1`` of every plan row."""
        live = self.live_rows()
        last = (self.end - self.start).cumsum(0) - 1
        slots, positions = self.x.rows.slots[live], self.x.rows.positions[live]
        return CatchUp(slots, positions, torch.ones_like(live, dtype=torch.bool), live, last, None)

    def catch_up_with_newest(self) -> CatchUp:
        """The live rows, and the newest token at ``end`` of every row that samples."""
        counts = self.end + self.samples - self.start
        owner = torch.repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        offset = torch.arange(owner.shape[0], device=owner.device) - starts[owner]
        source = (self.x.row_starts[owner] + offset).clamp(max=self.x.token_ids.shape[0] - 1)
        positions = self.start[owner] + offset
        computed = positions < self.end[owner]
        last = starts + counts - 1
        return CatchUp(self.slots[owner], positions, computed, source, last, window=None)

    def chains(self) -> Chains:
        """Where the rows that sample go on."""
        owner = self.samples.nonzero().squeeze(1)
        return Chains(owner, self.slots[owner], self.end[owner])

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Committed tokens of [T] slots and positions, as a copy. Positions < num_tokens."""
        return self._sequences.token_ids[slots, positions]

    def search(self, find: Callable[[Tensor, Tensor, Tensor], Found]) -> Found:
        """What ``find(token_ids, slots, num_tokens)`` finds in the slots' committed tokens.

        ``find`` only reads; tokens at ``num_tokens`` and above are undefined.
        """
        return find(self._sequences.token_ids, self.slots, self.num_tokens)

    def rows_at(
        self,
        slots: Tensor,
        positions: Tensor,
        window: int | None = None,
        committed: Tensor | None = None,
    ) -> AttentionRows:
        """Attention rows in the drafter's own KV, which shares the slots' block tables."""
        return self._sequences.rows_at(slots, positions, window, committed)

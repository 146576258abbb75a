"""What a drafter may read after a commit, in the compact layout of an eager step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from sametoken.kernels.draft_rows.layout import CatchUp, Chains
from sametoken.kernels.interface import AttentionRows
from sametoken.models.base import HiddenStates
from sametoken.state.inputs import StepInputs
from sametoken.state.sequences import Sequences

Found = TypeVar("Found")


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
        """The live rows of every plan row, each with the token after it (draft heads)."""
        live = self.live_rows()
        slots, positions = self.x.rows.slots[live], self.x.rows.positions[live]
        rows = self.rows_at(slots, positions)
        last = (self.end - self.start).cumsum(0) - 1
        return CatchUp(self.tokens_at(slots, positions + 1), rows, live, self._chains(last))

    def catch_up_with_newest(self) -> CatchUp:
        """The live rows, and the newest token at ``end`` of every row that samples.

        Each with its own token (draft models).
        """
        counts = self.end + self.samples - self.start
        owner = torch.repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        offset = torch.arange(owner.shape[0], device=owner.device) - starts[owner]
        slots, positions = self.slots[owner], self.start[owner] + offset
        rows = self.rows_at(slots, positions, committed=positions < self.end[owner])
        tokens = self.tokens_at(slots, positions)
        return CatchUp(tokens, rows, None, self._chains(starts + counts - 1))

    def advanced(self, chains: Chains) -> Chains:
        """The chains one position on."""
        rows = self.rows_at(chains.rows.slots, chains.following, 1, chains.rows.committed)
        return Chains(chains.owner, chains.last, rows, chains.following + 1)

    def _chains(self, last: Tensor) -> Chains:
        """Where the rows that sample go on; ``last`` is [B], each plan row's last row."""
        owner = self.samples.nonzero().squeeze(1)
        end, uncommitted = self.end[owner], torch.zeros_like(owner, dtype=torch.bool)
        rows = self.rows_at(self.slots[owner], end, 1, uncommitted)
        return Chains(owner, last[owner], rows, end + 1)

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

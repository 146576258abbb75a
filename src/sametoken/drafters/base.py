"""The drafter protocol and the null drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sametoken.kernels.interface import AttentionRows
from sametoken.models.base import HiddenStates
from sametoken.state.inputs import StepInputs
from sametoken.state.kv_cache import KVCache
from sametoken.state.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposals for the step's plan rows.

    Attributes:
        draft_ids: [B, k] int64; entries from ``num_drafts`` on are undefined but valid ids.
        num_drafts: [B] int64, 0..k.
    """

    draft_ids: Tensor
    num_drafts: Tensor


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may read after a commit: copies and derived lengths only.

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

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Committed tokens of [T] slots and positions, as a copy. Positions < num_tokens."""
        return self._sequences.token_ids[slots, positions]

    def history(self, slots: Tensor) -> Tensor:
        """[len(slots), max_len] int64 copy; tokens at num_tokens and above are undefined."""
        return self._sequences.token_ids.index_select(0, slots)

    def rows_at(self, slots: Tensor, positions: Tensor) -> AttentionRows:
        """Attention rows in the drafter's own KV, which shares the slots' block tables."""
        return self._sequences.rows_at(slots, positions)


class Drafter(Protocol):
    """Proposes drafts after each step, starting at the committed length.

    Attributes:
        kv_caches: the drafter's own KV memory, addressed by the slots' block tables; swapped
            out and in with the target's.
        lookahead_slots: positions at ``num_tokens`` and above that it may write KV to.
        lookahead_tokens: how many tokens after position p its KV at p depends on; prefix
            cache keys cover that many more tokens.
    """

    kv_caches: tuple[KVCache, ...]
    lookahead_slots: int
    lookahead_tokens: int

    def propose(self, context: DraftContext) -> Drafts:
        """Drafts for every plan row; rows that do not sample must get 0.

        A drafter with KV of its own also catches up on the live rows of rows that do not
        sample (prefill chunks).
        """
        ...


class NoDrafter:
    """Plain decoding: the same step with k = 0."""

    kv_caches: tuple[KVCache, ...] = ()
    lookahead_slots = 0
    lookahead_tokens = 0

    def propose(self, context: DraftContext) -> Drafts:
        """No drafts for any row."""
        batch = context.slots.shape[0]
        device = context.slots.device
        draft_ids = torch.zeros((batch, context.max_num_drafts), dtype=torch.int64, device=device)
        return Drafts(draft_ids, torch.zeros(batch, dtype=torch.int64, device=device))

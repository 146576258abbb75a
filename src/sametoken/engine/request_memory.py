"""What one request takes of the device's memory, from the sizes of its models alone."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.state.kv_cache import KVSpec
from sametoken.state.recurrent import RecurrentSpec


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """Bytes of one request; lengths are in tokens.

    Attributes:
        num_drafts: k.
        kv_per_token: the target's KV of one position.
        recurrent_state: the target's recurrent state, one per slot whatever k is.
        pending: raw inputs of k drafts that the target's recurrent layers keep beside it.
        draft_kv_per_token: the drafter's KV of one position.
        draft_recurrent: all that the drafter's recurrent layers keep.
    """

    num_drafts: int = 0
    kv_per_token: int = 0
    recurrent_state: int = 0
    pending: int = 0
    draft_kv_per_token: int = 0
    draft_recurrent: int = 0

    @classmethod
    def of(
        cls,
        num_drafts: int,
        kv: KVSpec,
        recurrent: RecurrentSpec | None,
        draft_kv: KVSpec | None,
        draft_recurrent: RecurrentSpec | None,
    ) -> RequestMemory:
        """From what the target and the drafter need per block and per slot."""
        return cls(
            num_drafts=num_drafts,
            kv_per_token=kv.bytes_per_block(1),
            recurrent_state=recurrent.state_bytes_per_slot if recurrent else 0,
            pending=recurrent.pending_bytes_per_slot(num_drafts) if recurrent else 0,
            draft_kv_per_token=draft_kv.bytes_per_block(1) if draft_kv else 0,
            draft_recurrent=draft_recurrent.bytes_per_slot(num_drafts) if draft_recurrent else 0,
        )

    @property
    def state_per_draft(self) -> int:
        """What a recurrent state for each draft position would take in place of ``pending``."""
        return self.num_drafts * self.recurrent_state

    def plain(self, num_tokens: int) -> int:
        """Bytes without speculation."""
        return self.recurrent_state + num_tokens * self.kv_per_token

    def speculation(self, num_tokens: int) -> int:
        """Bytes that speculation adds: pending inputs, KV of k drafts, and the drafter's own."""
        own = (num_tokens + self.num_drafts) * self.draft_kv_per_token + self.draft_recurrent
        return self.pending + self.num_drafts * self.kv_per_token + own

    def total(self, num_tokens: int) -> int:
        """Bytes with speculation."""
        return self.plain(num_tokens) + self.speculation(num_tokens)

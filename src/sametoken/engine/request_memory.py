"""What one request takes of the device's memory, from the sizes of its models alone."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.kernels.cache_types import LayerCache, bytes_per_block, bytes_per_slot


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
        target: tuple[LayerCache, ...],
        drafter: tuple[LayerCache, ...] = (),
    ) -> RequestMemory:
        """From what the layers of the target and of the drafter keep."""
        state = bytes_per_slot(target, 0)
        return cls(
            num_drafts=num_drafts,
            kv_per_token=bytes_per_block(target, 1),
            recurrent_state=state,
            pending=bytes_per_slot(target, num_drafts) - state,
            draft_kv_per_token=bytes_per_block(drafter, 1),
            draft_recurrent=bytes_per_slot(drafter, num_drafts),
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

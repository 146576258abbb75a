"""The memory that one request takes on the device."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.ops.cache_types import LayerCache, bytes_per_block, bytes_per_slot, state_bytes


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """Bytes of device memory per request; lengths are in tokens.

    Attributes:
        num_drafts: k.
        kv_per_token: the target's KV of one position.
        recurrent_state: the target's recurrent state, one per slot for any k.
        least_pending: without drafts, raw inputs of rows after it in the target's recurrent layers.
        pending: those of further rows, with k drafts.
        draft_kv_per_token: the drafter's KV of one position.
        draft_recurrent: state and pending inputs of the drafter's recurrent layers.
    """

    num_drafts: int = 0
    kv_per_token: int = 0
    recurrent_state: int = 0
    least_pending: int = 0
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
        """Compute the sizes from the layer caches of the target and of the drafter."""
        state, plain = state_bytes(target), bytes_per_slot(target, 0)
        return cls(
            num_drafts=num_drafts,
            kv_per_token=bytes_per_block(target, 1),
            recurrent_state=state,
            least_pending=plain - state,
            pending=bytes_per_slot(target, num_drafts) - plain,
            draft_kv_per_token=bytes_per_block(drafter, 1),
            draft_recurrent=bytes_per_slot(drafter, num_drafts),
        )

    @property
    def all_pending(self) -> int:
        """Raw inputs of all pending rows in the target's recurrent layers."""
        return self.least_pending + self.pending

    @property
    def state_per_draft(self) -> int:
        """Bytes of one recurrent state per draft position, the alternative to ``pending``."""
        return self.num_drafts * self.recurrent_state

    @property
    def kept_state(self) -> int:
        """Bytes of a recurrent state kept for prefix caching: a slot's, the drafter's included."""
        return self.recurrent_state + self.all_pending + self.draft_recurrent

    def plain(self, num_tokens: int) -> int:
        """Bytes without speculation."""
        return self.recurrent_state + self.least_pending + num_tokens * self.kv_per_token

    def speculation(self, num_tokens: int) -> int:
        """Bytes that speculation adds: pending inputs, KV of k drafts, the drafter's caches."""
        own = (num_tokens + self.num_drafts) * self.draft_kv_per_token + self.draft_recurrent
        return self.pending + self.num_drafts * self.kv_per_token + own

    def total(self, num_tokens: int) -> int:
        """Bytes with speculation."""
        return self.plain(num_tokens) + self.speculation(num_tokens)

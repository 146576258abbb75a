"""Per-slot facts on the device. ``commit.py`` and ``StepOps.commit`` alone write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Committed tokens, lengths, drafts and block tables of all slots.

    There are S = max_num_seqs + 1 slots; the last is reserved for padding rows.

    Attributes:
        token_ids: [S, max_len] int64, committed tokens below ``num_tokens``; undefined above.
        num_tokens: [S] int64, committed tokens: prompt and emitted.
        num_computed: [S] int64, positions whose KV exists; num_tokens - 1 when decoding.
        prompt_len: [S] int64.
        draft_ids: [S, k] int64, drafts for the next window.
        num_drafts: [S] int64, how many of them count.
        block_table: [S, max_blocks] int64, KV blocks by position; entries not yet assigned
            hold the reserved block, which no request owns.
        block_size: tokens per block.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    prompt_len: Tensor
    draft_ids: Tensor
    num_drafts: Tensor
    block_table: Tensor
    block_size: int

    @classmethod
    def allocate(
        cls,
        *,
        max_num_seqs: int,
        max_len: int,
        num_drafts: int,
        block_size: int,
        reserved_block: int,
        device: torch.device,
    ) -> Sequences:
        """Empty slots with room for ``max_len`` tokens each, drafts in flight included."""
        slots = max_num_seqs + 1
        max_blocks = -(-max_len // block_size)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            token_ids=zeros(slots, max_len),
            num_tokens=zeros(slots),
            num_computed=zeros(slots),
            prompt_len=zeros(slots),
            draft_ids=zeros(slots, num_drafts),
            num_drafts=zeros(slots),
            block_table=torch.full_like(zeros(slots, max_blocks), reserved_block),
            block_size=block_size,
        )

    @property
    def device(self) -> torch.device:
        """Where all of it lives."""
        return self.num_tokens.device

    @property
    def reserved_slot(self) -> int:
        """The slot of padding rows; no request ever owns it."""
        return self.num_tokens.shape[0] - 1

    @property
    def max_num_drafts(self) -> int:
        """k, the width of the draft buffer."""
        return self.draft_ids.shape[1]

"""Device state by slot, written only by ``slots.py``, ``StepOps.commit`` and ``publish``.

Also the texts of earlier requests, for drafters. Drafts never decide emitted tokens, so reading
other requests' texts changes no output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Committed tokens, lengths, drafts and block tables of all slots.

    There are S = max_num_seqs + 1 slots; the last one is reserved for padding rows.

    Attributes:
        token_ids: [S, max_len] int64, committed tokens below ``num_tokens``; undefined above.
        num_tokens: [S] int64, committed tokens: prompt and emitted.
        num_computed: [S] int64, positions whose KV exists; num_tokens - 1 when decoding.
        prompt_len: [S] int64.
        draft_ids: [S, k] int64, drafts for the next window.
        num_drafts: [S] int64, number of valid drafts.
        block_table: [S, max_blocks] int64, KV blocks by position; entries not yet assigned hold
            those of the slot's former request, or the reserved block, which no request owns.
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
        """The device of all tensors."""
        return self.num_tokens.device

    @property
    def reserved_slot(self) -> int:
        """The slot of padding rows, never owned by a request."""
        return self.num_tokens.shape[0] - 1

    @property
    def num_speculative_tokens(self) -> int:
        """k, the width of the draft buffer."""
        return self.draft_ids.shape[1]


@dataclass(slots=True, eq=False)
class TokenHistory:
    """Ring buffer of the last R texts, written in stream order by ``keep`` only.

    Attributes:
        texts: [R, W] int64 token ids; undefined at ``lengths`` and above.
        lengths: [R] int64, tokens of each; 0 for unused rows.
    """

    texts: Tensor
    lengths: Tensor
    _next: int = 0
    _used: set[int] = field(default_factory=set)

    @classmethod
    def allocate(cls, num_texts: int, max_len: int, device: torch.device) -> TokenHistory:
        """Room for ``num_texts`` texts of up to ``max_len`` tokens."""
        texts = torch.zeros((num_texts, max_len), dtype=torch.int64, device=device)
        return cls(texts, texts.new_zeros(num_texts))

    def keep(self, sequences: Sequences, slot: int) -> None:
        """Save a slot's prompt and output before another request takes the slot."""
        num_texts, longest = self.texts.shape
        if not num_texts:
            return
        if slot in self._used:
            row = self._next % num_texts
            width = min(longest, sequences.token_ids.shape[1])
            self.texts[row, :width].copy_(sequences.token_ids[slot, :width])
            self.lengths[row].copy_(sequences.num_tokens[slot])
            self._next += 1
        self._used.add(slot)


#: For drafters that do not read other requests' texts.
NO_HISTORY = TokenHistory.allocate(0, 1, torch.device("cpu"))

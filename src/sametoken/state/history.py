"""Texts of earlier requests, kept when their slots are taken up again. Drafters may read them.

What is drafted never decides what is emitted, so other requests' texts change no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.state.sequences import Sequences


@dataclass(slots=True, eq=False)
class TokenHistory:
    """The last R texts, the oldest replaced first. Written in stream order, by ``keep`` alone.

    Attributes:
        texts: [R, W] int64 token ids; undefined at ``lengths`` and above.
        lengths: [R] int64, tokens of each; 0 for texts not yet written.
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
        """Keep the text of a slot that is about to be another request's, prompt and output."""
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


#: For drafters that read no other request's text.
NO_HISTORY = TokenHistory.allocate(0, 1, torch.device("cpu"))

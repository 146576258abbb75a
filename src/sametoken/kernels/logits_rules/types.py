"""What the rules of logits read: S slots, of which few have any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class CommittedTokens(Protocol):
    """Committed tokens by slot, as ``state.sequences.Sequences`` holds them."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def prompt_len(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """What changes logits by token id or by history, by slot. Few slots have any.

    Attributes:
        edits: the host's: by slot, for those that mask or bias tokens, the row of integers on
            the device that says so (``kernels.logits_rules.layout``).
        edit_addresses: [S] int64, where that row lies in memory; 0 for none.
        counters: the host's: by slot, for those with penalties, a number below S of its own.
        counter_of: [S] int64, the same; -1 for none.
        repetition, frequency, presence: [S] fp32; 1, 0 and 0 change nothing.
    """

    edits: dict[int, Tensor]
    edit_addresses: Tensor
    counters: dict[int, int]
    counter_of: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

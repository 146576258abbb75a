"""What suffix search is told, and how it ranks the places that it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of so many neighbouring places, the best one votes, and so many of those at most.
GROUP = 16
MAX_VOTERS = 32


@dataclass(frozen=True, slots=True)
class Earlier:
    """Texts of earlier requests. R texts.

    Attributes:
        texts: [R, W] int64 token ids; what lies at ``lengths`` and above is never used.
        lengths: [R] int64, tokens of each.
    """

    texts: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a draft may be, as tables: kernels that read them do no arithmetic of their own.

    Attributes:
        num_drafts: [depth + 1] int64, drafts at most after a match of so many tokens.
        agreeing: [MAX_VOTERS + 1] int64, how many of so many voters must agree on a draft
            and all before it.
        k: the longest draft.
    """

    num_drafts: Tensor
    agreeing: Tensor
    k: int

    @classmethod
    def of(
        cls, k: int, *, depth: int, min_match: int, factor: float, min_prob: float,
        device: torch.device,
    ) -> Limits:  # fmt: skip
        """Tables on ``device``.

        Args:
            k: drafts at most.
            depth: longest match, in tokens.
            min_match: shortest match that gives drafts.
            factor: drafts at most for each matched token.
            min_prob: share of the voters that must agree, 0..1; never less than one.
            device: where the search will run.
        """
        lengths = range(depth + 1)
        num_drafts = [min(k, int(factor * n)) if n >= min_match else 0 for n in lengths]
        agreeing = [max(1, math.ceil(min_prob * n)) for n in range(MAX_VOTERS + 1)]
        return cls(
            torch.tensor(num_drafts, dtype=torch.int64, device=device),
            torch.tensor(agreeing, dtype=torch.int64, device=device),
            k,
        )

    @property
    def depth(self) -> int:
        """Longest match, in tokens."""
        return self.num_drafts.shape[0] - 1

"""The reduced vocabulary of a draft head: the tokens that answers are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens, ascending.

    Args:
        counts: [V] int64, how often each token occurs.
        size: how many to take; all if V is not larger. Of equal counts the lowest ids.

    Returns:
        [min(size, V)] int64.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def offsets_of(token_ids: Tensor) -> Tensor:
    """``d2t``: [D] int64, what to add to a draft id for the target's id."""
    return token_ids - torch.arange(token_ids.shape[0])


def membership(token_ids: Tensor, vocab_size: int) -> Tensor:
    """``t2d``: [V] bool, whether the head can propose a token."""
    inside = torch.zeros(vocab_size, dtype=torch.bool)
    inside[token_ids] = True
    return inside


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """Share of the counted tokens that the head can propose."""
    return int(counts[token_ids].sum()) / max(int(counts.sum()), 1)

"""What drafters with KV of their own share: spans of rows, and drafts of sampling rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.base import DraftContext, Drafts


def span(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``first[b] .. stop[b] - 1`` of every plan row, laid out flat.

    Args:
        first: [B] int64.
        stop: [B] int64, at least ``first``.

    Returns:
        owner [T] int64, the plan row of each flat row, and positions [T] int64.
    """
    counts = stop - first
    indices = torch.arange(counts.shape[0], device=counts.device)
    owner = torch.repeat_interleave(indices, counts)
    starts = counts.cumsum(0) - counts
    offsets = torch.arange(owner.shape[0], device=counts.device) - starts[owner]
    return owner, first[owner] + offsets


def drafts_of(context: DraftContext, sampling: Tensor, tokens: list[Tensor]) -> Drafts:
    """Drafts whose i-th tokens are ``tokens[i]`` for the sampling rows; none for the others.

    Args:
        context: the step's context.
        sampling: [R] int64, the plan rows that sample.
        tokens: one [R] int64 per draft position.
    """
    batch, k = context.slots.shape[0], context.max_num_drafts
    draft_ids = torch.zeros((batch, k), dtype=torch.int64, device=context.slots.device)
    draft_ids[sampling, : len(tokens)] = torch.stack(tokens, dim=1)
    return Drafts(draft_ids, context.samples * len(tokens))

"""What drafters that draft token by token share."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.base import Drafts
from sametoken.drafters.context import Chains, DraftContext


def drafts_of(context: DraftContext, chains: Chains, tokens: list[Tensor]) -> Drafts:
    """Drafts whose i-th tokens are ``tokens[i]`` for the chains; none for other plan rows.

    Args:
        context: the step's context.
        chains: the plan rows that sample.
        tokens: one [R] int64 per draft position.
    """
    batch, k = context.slots.shape[0], context.max_num_drafts
    draft_ids = torch.zeros((batch, k), dtype=torch.int64, device=context.slots.device)
    draft_ids[chains.owner, : len(tokens)] = torch.stack(tokens, dim=1)
    return Drafts(draft_ids, context.samples * len(tokens))

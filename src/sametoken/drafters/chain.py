"""What drafters that draft token by token share."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.base import Drafts
from sametoken.drafters.context import DraftContext
from sametoken.kernels.step.types import Chains


def drafts_of(context: DraftContext, chains: Chains, tokens: list[Tensor]) -> Drafts:
    """Drafts whose i-th tokens are ``tokens[i]`` for the chains; none for other requests.

    Args:
        context: the step's context.
        chains: the requests that sample.
        tokens: one [R] int64 for each of the k draft positions.
    """
    if chains.owner is None:
        return Drafts(*context.ops.stacked(tokens, context.samples))
    drafted = torch.stack(tokens, dim=1)
    draft_ids = drafted.new_zeros(context.slots.shape[0], len(tokens))
    draft_ids[chains.owner] = drafted
    return Drafts(draft_ids, context.samples * len(tokens))

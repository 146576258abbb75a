"""Drafts for several ranks: one rank makes them, all of them get the same."""

from __future__ import annotations

import torch

from sametoken.drafters.base import Drafter, Drafts
from sametoken.drafters.context import DraftContext
from sametoken.layers.parallel import TensorParallel
from sametoken.state.caches import ModelCache


class SharedDrafter:
    """Rank 0's proposals, on every rank.

    Args:
        inner: proposes; on the other ranks ``NoDrafter``, whose answer is replaced.
        parallel: the ranks.
    """

    def __init__(self, inner: Drafter, parallel: TensorParallel) -> None:
        self.kv_caches: tuple[ModelCache, ...] = inner.kv_caches
        self.lookahead_slots = inner.lookahead_slots
        self.lookahead_tokens = inner.lookahead_tokens
        self._inner = inner
        self._parallel = parallel

    def propose(self, context: DraftContext) -> Drafts:
        """The drafts that rank 0 makes."""
        own = self._inner.propose(context)
        flat = torch.cat((own.draft_ids.flatten(), own.num_drafts))
        shared = self._parallel.broadcast(flat)
        count = own.draft_ids.numel()
        return Drafts(shared[:count].view(own.draft_ids.shape), shared[count:])


def share_drafter(drafter: Drafter, num_drafts: int, parallel: TensorParallel) -> Drafter:
    """A rank's drafter: rank 0's decides for all, unless nothing is ever proposed."""
    if parallel.size == 1 or num_drafts == 0:
        return drafter
    return SharedDrafter(drafter, parallel)

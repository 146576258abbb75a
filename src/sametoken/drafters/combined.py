"""Drafters around drafters: a lookup before a model, and rank 0's drafts on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from sametoken.drafters.base import Drafter, DrafterAround, Drafts
from sametoken.drafters.context import DraftContext
from sametoken.layers.parallel import TensorParallel


class CascadeDrafter(DrafterAround):
    """Lookup drafts where they exist, a model's elsewhere; chosen per request on the device.

    The model's drafter sees a request with a match as one that does not sample: it computes the
    committed rows, so its KV stays complete, and drafts nothing. The compact layout runs no
    chain for these requests.

    Args:
        lookup: tried first; has no KV, and returns no drafts if its match is too short.
        model: drafts for the other requests, at most as many tokens as ``lookup``.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        super().__init__(model)
        self._lookup = lookup

    def propose(self, context: DraftContext) -> Drafts:
        """The lookup's drafts where it has any, the model's elsewhere."""
        first = self._lookup.propose(context)
        found = first.num_drafts > 0
        left = replace(context.x, samples=context.samples & ~found)
        second = self._inner.propose(replace(context, x=left))
        return Drafts(
            torch.where(found[:, None], first.draft_ids, second.draft_ids),
            torch.where(found, first.num_drafts, second.num_drafts),
        )


class SharedDrafter(DrafterAround):
    """Broadcasts rank 0's drafts to every rank.

    Args:
        inner: the drafter of each rank, which others may divide; ``NoDrafter`` on other ranks than
            0 if it has no weights.
        parallel: the ranks.
    """

    def __init__(self, inner: Drafter, parallel: TensorParallel) -> None:
        super().__init__(inner)
        self._parallel = parallel

    def propose(self, context: DraftContext) -> Drafts:
        """Rank 0's drafts."""
        own = self._inner.propose(context)
        flat = torch.cat((own.draft_ids.flatten(), own.num_drafts))
        shared = self._parallel.broadcast(flat)
        count = own.draft_ids.numel()
        return Drafts(shared[:count].view(own.draft_ids.shape), shared[count:])


def share_drafter(drafter: Drafter, num_drafts: int, parallel: TensorParallel) -> Drafter:
    """A rank's drafter, broadcasting rank 0's drafts if there are several ranks and any drafts."""
    if parallel.size == 1 or num_drafts == 0:
        return drafter
    return SharedDrafter(drafter, parallel)

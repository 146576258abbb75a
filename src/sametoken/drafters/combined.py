"""Two drafters in one: a match of text goes first, a model drafts where there is none.

Drafts for several ranks: one rank makes them, all of them get the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sametoken.drafters.base import Drafter, Drafts
from sametoken.drafters.context import DraftContext
from sametoken.layers.parallel import TensorParallel
from sametoken.state.caches import ModelCache


class CascadeDrafter:
    """Decides row by row, on the device and within the step.

    To the model's drafter a row with a match is one that does not sample: it catches up on
    the committed rows, so its KV is whole whenever its turn comes, and drafts nothing. In
    the compact layout no chain is run for such rows.

    Args:
        lookup: goes first. It has no KV, and finds nothing where its match is too short.
        model: drafts for the rows that are left, as many tokens as ``lookup`` or fewer.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model
        self.kv_caches: tuple[ModelCache, ...] = model.kv_caches
        self.lookahead_slots = model.lookahead_slots
        self.lookahead_tokens = model.lookahead_tokens

    def propose(self, context: DraftContext) -> Drafts:
        """The lookup's drafts where it has any, the model's elsewhere."""
        first = self._lookup.propose(context)
        found = first.num_drafts > 0
        left = replace(context.x, samples=context.samples & ~found)
        second = self._model.propose(replace(context, x=left))
        missing = first.draft_ids.shape[1] - second.draft_ids.shape[1]
        padded = torch.nn.functional.pad(second.draft_ids, (0, missing))
        return Drafts(
            torch.where(found[:, None], first.draft_ids, padded),
            torch.where(found, first.num_drafts, second.num_drafts),
        )


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

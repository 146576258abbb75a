"""Prompt lookup: what followed the same words before is likely to follow them again."""

from __future__ import annotations

import torch

from sametoken.drafters.base import DraftContext, Drafts
from sametoken.kernels.ngram import reference
from sametoken.state.kv_cache import KVCache


class NgramDrafter:
    """Copies the continuation of an earlier occurrence of the sequence's last tokens.

    Args:
        k: drafts per step at most.
        lookup_min: shortest suffix to match, in tokens.
        lookup_max: longest suffix to match, in tokens.
    """

    kv_caches: tuple[KVCache, ...] = ()
    lookahead_slots = 0
    lookahead_tokens = 0

    def __init__(self, k: int, lookup_min: int, lookup_max: int) -> None:
        self._k = k
        self._lookup_min = lookup_min
        self._lookup_max = lookup_max

    def propose(self, context: DraftContext) -> Drafts:
        """Drafts from each slot's own committed tokens; rows without a match get none."""
        draft_ids, count = reference.lookup(
            context.history(context.slots),
            context.num_tokens,
            min_length=self._lookup_min,
            max_length=self._lookup_max,
            k=self._k,
        )
        return Drafts(draft_ids, torch.where(context.samples, count, 0))

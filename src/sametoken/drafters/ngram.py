"""N-gram prompt lookup: drafts copied from an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import Drafts, LoadedDrafter, Placement
from sametoken.drafters.context import DraftContext
from sametoken.models.base import CausalLM
from sametoken.ops.lookup import ngram as reference
from sametoken.state.caches import ModelCache

Lookup = Callable[..., tuple[Tensor, Tensor]]


class NgramDrafter:
    """Copies the continuation of an earlier occurrence of the sequence's last tokens.

    Args:
        k: most drafts per step.
        lookup_min: shortest suffix to match, in tokens.
        lookup_max: longest suffix to match, in tokens.
        lookup: the search kernel.
    """

    kv_caches: tuple[ModelCache, ...] = ()
    lookahead_slots = 0
    lookahead_tokens = 0

    def __init__(
        self, k: int, lookup_min: int, lookup_max: int, lookup: Lookup = reference.lookup
    ) -> None:
        self._find = partial(lookup, min_length=lookup_min, max_length=lookup_max, k=k)

    def propose(self, context: DraftContext) -> Drafts:
        """Drafts from each slot's committed tokens; requests without a match get none."""
        draft_ids, count = context.search(self._find)
        return Drafts(draft_ids, torch.where(context.samples, count, 0))


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``."""
    shortest = max(spec.prompt_lookup_min, spec.shortest_match)
    longest = max(spec.prompt_lookup_max, shortest)
    k = spec.num_speculative_tokens
    drafter = NgramDrafter(k, shortest, longest, placement.backend.ngram)
    return LoadedDrafter((), lambda kv_cache, coupling: drafter)

"""N-gram prompt lookup: drafts copied from an earlier occurrence of the last tokens."""

from __future__ import annotations

from functools import partial

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import LoadedDrafter, Placement
from sametoken.drafters.lookup import LookupDrafter
from sametoken.models.base import CausalLM


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``."""
    shortest = max(spec.prompt_lookup_min, spec.shortest_match)
    longest = max(spec.prompt_lookup_max, shortest)
    k = spec.num_speculative_tokens
    find = partial(placement.backend.ngram, min_length=shortest, max_length=longest, k=k)
    drafter = LookupDrafter(find)
    return LoadedDrafter((), lambda kv_cache, coupling: drafter)

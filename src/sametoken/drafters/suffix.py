"""Suffix decoding: drafts as long as earlier continuations of the same suffix agree."""

from __future__ import annotations

from functools import partial

import torch

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import LoadedDrafter, Placement
from sametoken.drafters.lookup import LookupDrafter
from sametoken.models.base import CausalLM
from sametoken.ops.lookup.suffix import Earlier, Limits
from sametoken.state.sequences import TokenHistory

_HISTORY_BYTES = 2**28


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``; allocates the history of earlier texts."""
    limits = Limits.of(
        spec.num_speculative_tokens,
        depth=spec.suffix_decoding_max_tree_depth,
        min_match=spec.shortest_match,
        factor=spec.suffix_decoding_max_spec_factor,
        min_prob=spec.suffix_decoding_min_token_prob,
        device=placement.device,
    )
    max_texts = _HISTORY_BYTES // (placement.max_positions * torch.int64.itemsize)
    num_texts = min(spec.suffix_decoding_max_cached_requests, max_texts)
    history = TokenHistory.allocate(num_texts, placement.max_positions, placement.device)
    earlier = Earlier(history.texts, history.lengths)
    drafter = LookupDrafter(partial(placement.backend.suffix, earlier=earlier, limits=limits))
    return LoadedDrafter((), lambda kv_cache, coupling: drafter, history=history)

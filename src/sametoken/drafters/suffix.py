"""Suffix decoding: drafts as long as earlier continuations of the same suffix agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import Drafts, LoadedDrafter, Placement
from sametoken.drafters.context import DraftContext
from sametoken.models.base import CausalLM
from sametoken.ops.lookup import suffix as reference
from sametoken.ops.lookup.suffix import Earlier, Limits
from sametoken.state.caches import ModelCache
from sametoken.state.sequences import TokenHistory

Search = Callable[..., tuple[Tensor, Tensor]]
_HISTORY_BYTES = 2**28


class SuffixDrafter:
    """Copies the continuation of the longest match in the slot's text or in earlier texts.

    Args:
        limits: bounds of matches and drafts.
        history: earlier texts; read only.
        search: the search kernel.
    """

    kv_caches: tuple[ModelCache, ...] = ()
    lookahead_slots = 0
    lookahead_tokens = 0

    def __init__(
        self, limits: Limits, history: TokenHistory, search: Search = reference.search
    ) -> None:
        earlier = Earlier(history.texts, history.lengths)
        self._find = partial(search, earlier=earlier, limits=limits)

    def propose(self, context: DraftContext) -> Drafts:
        """Drafts from committed tokens; requests without a match get none."""
        draft_ids, count = context.search(self._find)
        return Drafts(draft_ids, torch.where(context.samples, count, 0))


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
    drafter = SuffixDrafter(limits, history, placement.backend.suffix)
    return LoadedDrafter((), lambda kv_cache, coupling: drafter, history=history)

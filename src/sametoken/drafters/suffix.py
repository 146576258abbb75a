"""Suffix decoding: drafts as long as earlier continuations of the text's end agree on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sametoken.drafters.base import Drafts
from sametoken.drafters.context import DraftContext
from sametoken.ops.lookup import suffix as reference
from sametoken.ops.lookup.suffix import (
    Earlier,
    Limits,
)
from sametoken.state.caches import ModelCache
from sametoken.state.sequences import TokenHistory

Search = Callable[..., tuple[Tensor, Tensor]]


class SuffixDrafter:
    """Copies what followed the longest match, in the slot's own text or in an earlier one.

    Args:
        limits: how long a draft may be.
        history: earlier texts; read only.
        search: the kernel that searches.
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
        """Drafts from committed tokens; rows without a match get none."""
        draft_ids, count = context.search(self._find)
        return Drafts(draft_ids, torch.where(context.samples, count, 0))

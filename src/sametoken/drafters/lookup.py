"""A drafter that copies from text which went on from the same tokens before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter, Drafts
from sametoken.drafters.context import DraftContext


class LookupDrafter(Drafter):
    """Copies the continuation of an earlier occurrence of the sequence's last tokens.

    Args:
        find: a search of ``ops.lookup`` with its options, as ``DraftContext.search`` calls it;
            its result is as in ``Drafts``.
    """

    def __init__(self, find: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._find = find

    def propose(self, context: DraftContext) -> Drafts:
        """Drafts from committed tokens; requests without a match get none."""
        draft_ids, count = context.search(self._find)
        return Drafts(draft_ids, torch.where(context.samples, count, 0))

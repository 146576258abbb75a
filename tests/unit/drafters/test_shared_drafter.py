"""Drafts are made once, by rank 0."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from helpers.thread_ranks import run_ranks
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.combined import share_drafter
from sametoken.layers.parallel import SINGLE_RANK

CONTEXT = SimpleNamespace(slots=torch.tensor([5, 1, 3]), num_speculative_tokens=2)


class Countdown:
    kv_caches = ()
    lookahead_slots = 7
    lookahead_tokens = 1

    def propose(self, context):
        count = torch.arange(len(context.slots))
        return Drafts(torch.stack((9 - count, 8 - count), dim=1), count % 3)


def test_every_rank_gets_rank_0_s():
    def run(parallel):
        inner = Countdown() if parallel.rank == 0 else NoDrafter()
        drafter = share_drafter(inner, 2, parallel)
        drafts = drafter.propose(CONTEXT)
        lookahead = drafter.lookahead_slots, drafter.lookahead_tokens
        return drafts.draft_ids.tolist(), drafts.num_drafts.tolist(), lookahead

    first, second = run_ranks(2, run)
    assert first == ([[9, 8], [8, 7], [7, 6]], [0, 1, 2], (7, 1))
    assert second[:2] == first[:2]


def test_nothing_is_copied_where_nothing_is_shared():
    inner = NoDrafter()
    assert share_drafter(inner, 3, SINGLE_RANK) is inner
    assert run_ranks(2, lambda p: share_drafter(inner, 0, p))[1] is inner

"""Cascades, and drafts shared by ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.drafting import NOT_A_TOKEN, Bench, requests_of
from helpers.lookups import ngram_drafter, suffix_drafter
from helpers.suffixes import Options
from helpers.thread_ranks import run_ranks
from helpers.toy import ToyModel
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.combined import CascadeDrafter, share_drafter
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.layers.parallel import SINGLE_RANK

VOCAB = 3


class CountingModel(ToyModel):
    """Notes how many rows each forward pass had."""

    def forward(self, token_ids, rows, kv, kept=None):
        self.num_rows = [*getattr(self, "num_rows", []), len(token_ids)]
        return super().forward(token_ids, rows, kv, kept)


def build(k: int, own: int, lookup: str, **options):
    bench = Bench(ToyModel(VOCAB), k, seed=own, **options)
    model = CountingModel(VOCAB)
    drafter = DraftModelDrafter(model, bench.allocate(model.caches), own, bench.coupling)
    lookups = {"ngram": ngram_drafter(k, 2, 4), "suffix": suffix_drafter(Options(k, min_match=2))}
    first = lookups[lookup]
    bench.drafter = CascadeDrafter(first, drafter)
    return bench, first, model


@pytest.mark.parametrize(
    ("k", "own", "lookup"), [(3, 3, "ngram"), (4, 2, "ngram"), (4, 2, "suffix"), (1, 1, "suffix")]
)
def test_each_row_has_the_drafts_of_one_of_the_two(k, own, lookup):
    bench, first, _ = build(k, own, lookup, num_wanted=(None, 1, 0))
    counts = {"lookup": 0, "model": 0}

    def check(context, drafts):
        found = first.propose(context)
        for b, slot in requests_of(context):
            ids = drafts.draft_ids[b, : int(drafts.num_drafts[b])].tolist()
            assert NOT_A_TOKEN not in ids
            if not context.samples[b]:
                continue
            if found.num_drafts[b]:
                counts["lookup"] += 1
                assert ids == found.draft_ids[b, : int(found.num_drafts[b])].tolist()
            else:
                # The draft model is the target itself.
                counts["model"] += 1
                tokens = bench.tokens(slot)
                for _ in range(min(own, context.num_wanted)):
                    tokens.append(bench.target.next_token(tokens))
                assert ids == tokens[int(context.num_tokens[b]) :]
        for b, slot in requests_of(context):
            end = int(context.end[b])
            kept = bench.cached(bench.drafter.kv_caches[0], slot, end)[0, 0, :, 0, 0]
            assert kept.tolist() == bench.tokens(slot)[:end]

    bench.run(60, VOCAB, check)
    assert min(counts.values()) > 10


def test_no_chain_is_run_for_rows_with_a_match():
    """Where shapes may follow the data."""
    bench, first, model = build(4, 4, "ngram", steps="compact")

    def check(context, drafts):
        left = int((context.samples & (first.propose(context).num_drafts == 0)).sum())
        # One pass over the committed rows, then one row for each chain and further draft.
        assert model.num_rows[1:] == [left] * 3 * (left > 0)
        model.num_rows = []

    bench.run(40, VOCAB, check)


def test_it_needs_what_its_model_needs():
    bench, _, _ = build(5, 3, "suffix")
    assert bench.drafter.lookahead_slots == 2
    assert bench.drafter.lookahead_tokens == 0
    assert len(bench.drafter.kv_caches) == 1


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

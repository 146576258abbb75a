"""The n-gram drafter reads committed tokens of its own slot, and nothing else."""

from __future__ import annotations

import pytest

from helpers.drafting import NOT_A_TOKEN, Bench, requests_of
from helpers.lookups import ngram_drafter, slow_lookup
from helpers.toy import ToyModel


@pytest.mark.parametrize(("k", "shortest", "longest"), [(4, 1, 1), (1, 1, 4), (4, 1, 4), (4, 2, 3)])
def test_drafts_follow_the_slots_own_committed_tokens(k, shortest, longest):
    bench = Bench(ToyModel(3), k, seed=k)
    bench.drafter = ngram_drafter(k, shortest, longest)
    found = 0

    def check(context, drafts):
        nonlocal found
        assert NOT_A_TOKEN not in drafts.draft_ids
        for b, slot in requests_of(context):
            count = int(drafts.num_drafts[b])
            found += count
            if context.samples[b]:
                expected = slow_lookup(bench.tokens(slot), shortest, longest, k)
                assert drafts.draft_ids[b, :count].tolist() == expected

    bench.run(60, 3, check)
    assert found > 20

"""The n-gram drafter reads committed tokens of its own slot, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.drafting import NOT_A_TOKEN, Bench, requests_of
from helpers.lookups import ngram_drafter, slow_lookup
from helpers.toy import ToyModel
from sametoken.config import SpeculativeConfig
from sametoken.drafters import ngram


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


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}, (2, 3)),
        # One that goes first matches no fewer tokens than a cascade needs.
        (
            {"method": "draft_model", "model": "m", "cascade": "ngram", "cascade_min_match": 7},
            (7, 7),
        ),
        (
            {"method": "draft_model", "model": "m", "cascade": "ngram", "cascade_min_match": 2}
            | {"prompt_lookup_min": 3},
            (3, 5),
        ),
    ],
)
def test_the_lengths_of_matches_are_those_of_the_options(options, lengths):
    spec = SpeculativeConfig(num_speculative_tokens=4, **options)
    placement = SimpleNamespace(backend=SimpleNamespace(ngram=slow_lookup))
    drafter = ngram.load(spec, ToyModel(3), placement).attach(None, None)
    shortest, longest = lengths
    assert drafter._find.keywords == {"min_length": shortest, "max_length": longest, "k": 4}

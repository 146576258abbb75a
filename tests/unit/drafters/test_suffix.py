"""The suffix drafter reads committed tokens of its own slot and of earlier requests alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.drafting import CPU, MAX_LEN, NOT_A_TOKEN, Bench, requests_of
from helpers.lookups import suffix_drafter
from helpers.suffixes import Options, slow_search
from helpers.toy import ToyModel
from sametoken.config import SpeculativeConfig
from sametoken.drafters import suffix
from sametoken.state.sequences import TokenHistory


class KeepingBench(Bench):
    """Keeps texts as the runner does, and notes them by itself."""

    history: TokenHistory
    kept: list[list[int]]

    def admit(self, slot, prompt, cached=()) -> None:
        used = slot in self.blocks
        former = self.tokens(slot) if used else []
        self.history.keep(self.sequences, slot)
        if used:
            self.kept.append(former)
        super().admit(slot, prompt, cached)


@pytest.mark.parametrize(
    ("options", "num_texts"),
    [(Options(1), 3), (Options(5, depth=4, factor=2.0, min_prob=0.6), 0), (Options(5), 3)],
)
def test_drafts_follow_committed_tokens(options, num_texts):
    bench = KeepingBench(ToyModel(3), options.k, seed=options.k)
    bench.history, bench.kept = TokenHistory.allocate(num_texts, MAX_LEN, CPU), []
    bench.drafter = suffix_drafter(options, bench.history)
    found = 0

    def check(context, drafts):
        nonlocal found
        assert NOT_A_TOKEN not in drafts.draft_ids
        # The texts in the order in which they lie: the oldest is replaced first.
        others = [[] for _ in range(num_texts)]
        for index, text in enumerate(bench.kept if num_texts else []):
            others[index % num_texts] = text
        for b, slot in requests_of(context):
            count = int(drafts.num_drafts[b])
            found += count
            if context.samples[b]:
                expected = slow_search(bench.tokens(slot), others, options)
                assert drafts.draft_ids[b, :count].tolist() == expected

    bench.run(60, 3, check)
    assert found > 20
    assert len(bench.kept) > 3


@pytest.mark.parametrize(("wanted", "kept"), [(3, 3), (100, 8)])
def test_the_history_has_as_many_texts_as_are_wanted_within_its_bytes(monkeypatch, wanted, kept):
    monkeypatch.setattr(suffix, "_HISTORY_BYTES", 8 * 64 * 8)
    spec = SpeculativeConfig("suffix", 4, suffix_decoding_max_cached_requests=wanted)
    backend = SimpleNamespace(suffix=slow_search)
    placement = SimpleNamespace(backend=backend, device=CPU, max_positions=64)
    assert suffix.load(spec, ToyModel(3), placement).history.texts.shape == (kept, 64)

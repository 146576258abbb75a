"""The draft model: equal to its target it is always right, and it reads true rows only."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.drafting import Bench, requests_of, require_all_accepted, require_lookahead_slots
from helpers.toy import ToyModel
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.ops.sampling.sample import sample

VOCAB = 11


def bench_of(
    k: int, seed: int, drafter_model: ToyModel | None = None, max_model_len: int = 0, **options
) -> Bench:
    bench = Bench(ToyModel(VOCAB), k, seed=seed, **options)
    model = drafter_model or ToyModel(VOCAB)
    cache = bench.allocate(model.caches)
    bench.drafter = DraftModelDrafter(model, cache, k, bench.coupling, VOCAB, max_model_len)
    return bench


def continuation(bench: Bench, slot: int) -> list[int]:
    """What the target would emit next with nothing cached, k tokens."""
    tokens = bench.tokens(slot)
    for _ in range(bench.k):
        hidden = torch.tensor([[float(bench.target._hash(tokens)), 1.0]], dtype=torch.float64)
        chosen = sample(
            bench.target.compute_logits(hidden),
            bench.table.temperature[slot].view(1),
            bench.table.seed[slot].view(1),
            torch.tensor([len(tokens)]),
        )
        tokens.append(int(chosen))
    return tokens[-bench.k :]


@pytest.mark.parametrize(
    ("k", "temperature", "padding"),
    [(1, 0.8, 0), (2, 0.0, 0), (5, 0.8, 0), (2, 0.0, 9), (3, 0.8, 1)],
)
def test_a_drafter_equal_to_its_target_is_always_right(k, temperature, padding):
    """And if it is padded to more tokens: it never proposes those."""
    bench = bench_of(k, k, ToyModel(VOCAB + padding), temperature=temperature)

    def check(context, drafts):
        for b, slot in requests_of(context):
            if context.samples[b]:
                assert int(drafts.num_drafts[b]) == k
                assert drafts.draft_ids[b].tolist() == continuation(bench, slot)

    bench.run(40, VOCAB, check)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_draft_of_it_is_accepted(temperature):
    bench = bench_of(4, seed=3, temperature=temperature, spoil=0.0)
    require_all_accepted(bench, 45, VOCAB)


@pytest.mark.usefixtures("layouts")
def test_fewer_drafts_are_the_first_of_all_and_their_passes_are_not_run(monkeypatch):
    bench = bench_of(4, seed=3, temperature=0.8, num_wanted=(3, 0, None, 1, 0))
    passes = []
    run_pass = bench.drafter._model.forward
    monkeypatch.setattr(
        bench.drafter._model, "forward", lambda *rows: passes.append(rows) or run_pass(*rows)
    )

    def check(context, drafts):
        # One catches up, and gives the first draft; in static steps padding has drafts too.
        drafted = context.samples.any() or bench.steps != "compact"
        assert len(passes) == max(1, context.num_wanted if drafted else 0)
        passes.clear()
        for b, slot in requests_of(context):
            if context.samples[b]:
                assert int(drafts.num_drafts[b]) == context.num_wanted
                made = drafts.draft_ids[b, : context.num_wanted].tolist()
                assert made == continuation(bench, slot)[: context.num_wanted]

    bench.run(40, VOCAB, check)


@pytest.mark.parametrize(("num_own", "salt"), [(VOCAB, 1), (VOCAB, 2), (VOCAB - 1, 1)])
def test_its_kv_holds_the_committed_token_at_every_computed_position(num_own, salt):
    """In the place of a token that only the target is padded to, its own last one."""
    bench = bench_of(4, seed=9, drafter_model=ToyModel(num_own, salt))

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            end = int(context.end[b])
            keys = bench.cached(cache, slot, end)[0, 0, :, 0, 0]
            assert keys.tolist() == [min(t, num_own - 1) for t in bench.tokens(slot)[:end]]

    bench.run(40, VOCAB, check)
    assert bench.counts.cached


def test_it_writes_no_further_than_it_says():
    require_lookahead_slots(bench_of(5, seed=4), 40, VOCAB, 4)


def test_there_are_drafts_as_far_as_it_has_positions():
    k, most = 3, 20
    model = ToyModel(VOCAB)
    model.config = dataclasses.replace(model.config, max_position_embeddings=most)
    bench = bench_of(k, 6, model, max_model_len=64)
    seen = set()

    def check(context, drafts):
        for b, _ in requests_of(context):
            # The last draft is not run.
            fits = int(context.num_tokens[b]) + k - 2 < most
            assert int(drafts.num_drafts[b]) == k * (fits and bool(context.samples[b]))
            seen.add((fits, bool(context.samples[b])))

    bench.run(40, VOCAB, check)
    assert seen >= {(True, True), (False, True)}

"""The draft model: equal to its target it is always right, and it reads true rows only."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.drafting import BLOCK_SIZE, Bench, requests_of
from helpers.toy import ToyModel, toy_config
from sametoken.drafters.draft_model import DraftModelDrafter, require_fit
from sametoken.errors import DrafterMismatchError
from sametoken.ops.sampling.sample import sample

VOCAB = 11


def bench_of(k: int, seed: int, drafter_model: ToyModel | None = None, **options) -> Bench:
    bench = Bench(ToyModel(VOCAB), k, seed=seed, **options)
    model = drafter_model or ToyModel(VOCAB)
    cache = bench.allocate(model.caches)
    bench.drafter = DraftModelDrafter(model, cache, k, bench.coupling)
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


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.8), (2, 0.0), (5, 0.8)])
def test_a_drafter_equal_to_its_target_is_always_right(k, temperature):
    bench = bench_of(k, seed=k, temperature=temperature)

    def check(context, drafts):
        for b, slot in requests_of(context):
            if context.samples[b]:
                assert int(drafts.num_drafts[b]) == k
                assert drafts.draft_ids[b].tolist() == continuation(bench, slot)

    bench.run(40, VOCAB, check)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_draft_of_it_is_accepted(temperature):
    bench = bench_of(4, seed=3, temperature=temperature, spoil=0.0)
    bench.run(45, VOCAB, lambda context, drafts: None)
    assert bench.counts.offered > 30
    assert bench.counts.accepted == bench.counts.offered


@pytest.mark.parametrize("salt", [1, 2])
def test_its_kv_holds_the_committed_token_at_every_computed_position(salt):
    bench = bench_of(4, seed=9, drafter_model=ToyModel(VOCAB, salt))

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            end = int(context.end[b])
            keys = bench.cached(cache, slot, end)[0, 0, :, 0, 0]
            assert keys.tolist() == bench.tokens(slot)[:end]

    bench.run(40, VOCAB, check)
    assert bench.counts.cached


def test_it_writes_no_further_than_it_says():
    k = 5
    bench = bench_of(k, seed=4)
    assert bench.drafter.lookahead_slots == k - 1

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            written = int(context.end[b])
            if context.samples[b]:
                written = int(context.num_tokens[b]) + k - 1
            blocks = torch.tensor(bench.blocks[slot])
            where = torch.arange(len(blocks) * BLOCK_SIZE)
            keys = cache.kv(0).keys[blocks[where // BLOCK_SIZE], 0, where % BLOCK_SIZE, 0]
            assert not keys[:written].isnan().any()
            assert keys[written:].isnan().all()

    bench.run(40, VOCAB, check)


def test_another_vocabulary_or_too_few_positions_are_refused():
    target = toy_config(11, 64)
    require_fit(toy_config(11, 64), target, 64)
    with pytest.raises(DrafterMismatchError, match=r"12 tokens, the target 11"):
        require_fit(dataclasses.replace(target, vocab_size=12), target, 64)
    with pytest.raises(DrafterMismatchError, match=r"32 positions, below max_model_len=64"):
        require_fit(toy_config(11, 32), target, 64)

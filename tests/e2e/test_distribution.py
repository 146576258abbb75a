"""Sampled output follows the target's distribution with every drafter, through the engine.

Pairs of tokens after one prompt, over many seeds. With a drafter, the second token of a pair comes
out of a window that held drafts, some of them made with the target's own noise.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from helpers.harness import Ran, ScriptedDrafter, Shape, build, draft_model, request, run
from helpers.lookups import ngram_drafter
from helpers.toy import ToyModel

VOCAB, SEEDS = 5, 1500
MODEL = ToyModel(VOCAB)
OTHER = ToyModel(VOCAB, salt=2)
PROMPT = (1, 2, 3, 4, 1, 2, 3, 4, 0, 1, 0, 2, 0, 3, 0, 4)
SHAPE = Shape(
    num_drafts=2,
    steps_in_flight=2,
    max_num_seqs=50,
    max_num_batched_tokens=600,
    prefill_chunk_size=16,
    num_blocks=400,
    max_model_len=24,
)


DRAFTERS = {
    "ngram": lambda parts: ngram_drafter(SHAPE.num_drafts),
    "the target itself, with its noise": lambda parts: draft_model(parts, MODEL),
    "another model, with the target's noise": lambda parts: draft_model(parts, OTHER),
    "always wrong": lambda parts: ScriptedDrafter(parts, "wrong"),
}


def probabilities(tokens) -> torch.Tensor:
    hidden = torch.tensor([[float(MODEL._hash(tokens)), 1.0]], dtype=torch.float64)
    return MODEL.compute_logits(hidden)[0].double().softmax(0)


def sampled(make_drafter, num_seeds: int) -> Ran:
    seeds = range(num_seeds)
    items = [request(str(s), PROMPT, max_tokens=3, temperature=1.0, seed=s) for s in seeds]
    core = build(
        MODEL, SHAPE, make_drafter=make_drafter, oracle=lambda admitted: [0] * SHAPE.max_model_len
    )
    return run(core, items, max_steps=20_000)


@cache
def plain() -> Ran:
    return sampled(None, SEEDS)


def test_pairs_of_tokens_follow_the_target():
    found = Counter(tuple(out[:2]) for out in plain().tokens.values())
    expected = {
        (a, b): SEEDS * float(first * second)
        for a, first in enumerate(probabilities(PROMPT))
        for b, second in enumerate(probabilities((*PROMPT, a)))
    }
    # Rare pairs together make one cell, as the chi-square test wants cells of five and more.
    common = [pair for pair, count in expected.items() if count >= 5]
    cells = [found[pair] for pair in common]
    wanted = [expected[pair] for pair in common]
    cells.append(SEEDS - sum(cells))
    wanted.append(SEEDS - sum(wanted))
    assert chisquare(cells, wanted).pvalue > 1e-4


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_a_sample(name):
    ran = sampled(DRAFTERS[name], 300)
    assert ran.tokens == {seed: plain().tokens[seed] for seed in ran.tokens}
    assert ran.offered > 0
    if name == "the target itself, with its noise":
        assert ran.accepted == ran.offered

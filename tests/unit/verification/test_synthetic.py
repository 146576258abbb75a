"""Synthetic acceptance: rates as asked, a function of seed and position, real logits beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.config import SpeculativeConfig
from sametoken.core.sampling_params import SamplingParams
from sametoken.kernels.reference import ReferenceKernels
from sametoken.verification.keyed import KeyedVerifier
from sametoken.verification.synthetic import (
    SyntheticVerifier,
    conditional_rates,
    make_verifier,
    synthetic_accepted,
)

CPU = torch.device("cpu")
VOCAB = 11


def drawn(unconditional, num_windows=20_000, num_drafts=None, first_seed=0):
    """num_accepted of windows with seeds and positions of their own."""
    rates = conditional_rates(unconditional, CPU)
    index = torch.arange(num_windows)
    drafts = torch.full_like(index, len(unconditional) if num_drafts is None else num_drafts)
    return synthetic_accepted(rates, first_seed + index % 100, 7 + index // 100, drafts)


def splitmix(seed: int, position: int) -> float:
    """SplitMix64's word number ``position`` from ``seed``, in Python's own integers."""
    mask = (1 << 64) - 1
    word = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return ((word >> 40) & 0xFFFFFF) / 2**24


@pytest.mark.parametrize(
    "rates", [(0.8, 0.64, 0.51), (0.9, 0.1), (1.0, 1.0, 0.0), (0.0,), (0.5, 0.5)]
)
def test_every_draft_is_accepted_at_its_unconditional_rate(rates):
    accepted = drawn(rates)
    for i, rate in enumerate(rates):
        assert (accepted > i).double().mean().item() == pytest.approx(rate, abs=0.015)


def test_consecutive_positions_of_one_seed_are_independent():
    """Windows of a request follow each other, so its own positions must not be correlated."""
    rates = conditional_rates((0.5,), CPU)
    positions = torch.arange(20_000)
    seeds, one = torch.full_like(positions, 123), torch.ones_like(positions)
    hit = synthetic_accepted(rates, seeds, positions, one).double()
    for lag in (1, 2, 3, 64):
        both = (hit[lag:] * hit[:-lag]).mean().item()
        assert both == pytest.approx(0.25, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 6))
def test_the_draw_is_splitmix_at_the_drafts_position(seed, position, num_drafts):
    unconditional = (0.9, 0.7, 0.6, 0.3, 0.3, 0.1)
    rates = conditional_rates(unconditional, CPU)
    expected = 0
    while expected < num_drafts and splitmix(seed, position + expected) < rates[expected]:
        expected += 1
    args = (torch.tensor([seed]), torch.tensor([position]), torch.tensor([num_drafts]))
    assert synthetic_accepted(rates, *args).tolist() == [expected]


def test_company_and_offered_drafts_only_bound_the_draw():
    alone = drawn((0.8, 0.64, 0.51), 500)
    assert torch.equal(drawn((0.8, 0.64, 0.51), 1000)[:500], alone)
    for limit in range(4):
        assert torch.equal(drawn((0.8, 0.64, 0.51), 500, limit), alone.clamp(max=limit))


def test_shapes_are_fixed_so_that_a_graph_can_hold_it():
    """Under ``meta`` no value exists: whatever asks for one on the host raises."""
    rates = torch.empty(3, device="meta")
    rows = torch.empty(5, dtype=torch.int64, device="meta")
    assert synthetic_accepted(rates, rows, rows, rows).shape == (5,)


@pytest.fixture
def step(stage_step, make_row):
    def seeded(seed):
        return SamplingParams(temperature=0.0, seed=seed)

    rows = [
        make_row((1, 2, 3), (4,), (5, 6, 7), seeded(1)),
        make_row((1, 2), (), (), seeded(2)),
        make_row((1, 2, 3, 4), params=seeded(3), num_query=2, samples=False),
        make_row((9, 8), (7, 6), (5, 4), seeded(4)),
    ]
    return stage_step(rows)


def verifier_of(step, rates):
    return SyntheticVerifier(step.verifier, step.table, conditional_rates(rates, CPU))


def logits_of(step):
    return torch.randn(step.num_logits, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rates", [(1.0,) * 4, (1.0, 0.5, 0.5, 0.0), (0.0,) * 4])
def test_accepted_drafts_are_emitted_and_the_next_token_is_the_target_s_own(step, rates):
    logits = logits_of(step)
    own = logits.argmax(dim=-1).tolist()
    verdict = verifier_of(step, rates).judge(logits, step.x)
    x = step.x
    expected = synthetic_accepted(
        conditional_rates(rates, CPU), step.table.seed[x.slots], x.num_tokens, x.num_drafts
    )
    start = 0
    for b, row in enumerate(step.rows):
        accepted = int(verdict.num_accepted[b])
        if not row.samples:
            assert accepted == 0
            continue
        assert accepted == int(expected[b]) <= len(row.drafts)
        assert int(verdict.next_token[b]) == own[start + accepted]
        emitted = verdict.tokens[start : start + accepted + 1].tolist()
        assert emitted == [*row.drafts[:accepted], own[start + accepted]]
        start += row.window
    assert not verdict.poisoned.any()


def test_nan_counts_exactly_in_the_rows_that_decide(step):
    for rates, poisoned in (((1.0,) * 4, True), ((0.0,) * 4, False)):
        logits = logits_of(step)
        logits[2, 3] = float("nan")
        verdict = verifier_of(step, rates).judge(logits, step.x)
        assert verdict.poisoned.tolist() == [poisoned, False, False, False]
        assert int(verdict.num_accepted[0]) == 0


def test_the_config_chooses_the_verifier(step):
    kernels = ReferenceKernels()
    plain = SpeculativeConfig("ngram", 3)
    synthetic = SpeculativeConfig(
        "ngram", 3, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5
    )
    for config, kind in (
        (None, KeyedVerifier),
        (plain, KeyedVerifier),
        (synthetic, SyntheticVerifier),
    ):
        made = make_verifier(config, kernels, step.sequences, step.table)
        assert type(made) is kind
    verdict = made.judge(logits_of(step), step.x)
    assert verdict.num_accepted.tolist()[0] in (1, 2)

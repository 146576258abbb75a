"""Synthetic acceptance: rates as asked, each position by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sametoken.ops.step.reference import verify
from sametoken.ops.step.types import Chances
from sametoken.runner.step import conditional_rates

CPU = torch.device("cpu")


def accepted(rates, seeds, positions, num_drafts) -> torch.Tensor:
    """num_accepted of a window for each seed, whose target agrees with no draft."""
    count, k = len(seeds), len(rates)
    x = SimpleNamespace(
        slots=torch.arange(count),
        samples=torch.ones(count, dtype=torch.bool),
        num_tokens=positions,
        num_drafts=num_drafts,
        window_starts=torch.arange(count + 1) * (k + 1),
        sampled=SimpleNamespace(token_ids=torch.ones(count * (k + 1), dtype=torch.int64)),
    )
    keys = torch.full((count * (k + 1), 1), 0xFFFFFFFF)
    return verify(keys, x, Chances(rates, seeds)).num_accepted


def drawn(unconditional, num_windows=20_000, num_drafts=None):
    """num_accepted of windows with seeds and positions of their own."""
    index = torch.arange(num_windows)
    drafts = torch.full_like(index, len(unconditional) if num_drafts is None else num_drafts)
    rates = conditional_rates(unconditional, CPU)
    return accepted(rates, index % 100, 7 + index // 100, drafts)


@pytest.mark.parametrize(
    "rates", [(0.8, 0.64, 0.51), (0.9, 0.1), (1.0, 1.0, 0.0), (0.0,), (0.5, 0.5)]
)
def test_every_draft_is_accepted_at_its_unconditional_rate(rates):
    found = drawn(rates)
    for i, rate in enumerate(rates):
        assert (found > i).double().mean().item() == pytest.approx(rate, abs=0.015)


def test_consecutive_positions_of_one_seed_are_independent():
    """Windows of a request follow each other, so its own positions must not be correlated."""
    positions = torch.arange(20_000)
    one = torch.ones_like(positions)
    hit = accepted(conditional_rates((0.5,), CPU), one * 123, positions, one).double()
    for lag in (1, 2, 3, 64):
        both = (hit[lag:] * hit[:-lag]).mean().item()
        assert both == pytest.approx(0.25, abs=0.02)


def test_company_and_offered_drafts_only_bound_the_draw():
    alone = drawn((0.8, 0.64, 0.51), 500)
    assert torch.equal(drawn((0.8, 0.64, 0.51), 1000)[:500], alone)
    for limit in range(4):
        assert torch.equal(drawn((0.8, 0.64, 0.51), 500, limit), alone.clamp(max=limit))

"""Synthetic acceptance in Triton draws what the reference draws."""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.acceptance import reference
from sametoken.kernels.acceptance.triton import accepted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("k", [1, 3, 4, 64])
def test_equals_the_reference(k):
    generator = torch.Generator().manual_seed(k)

    def integers(high):
        return torch.randint(high, (37,), generator=generator)

    rates = 0.5 + 0.4 * torch.rand(k, generator=generator)
    inputs = (rates, integers(2**63 - 1), integers(2**31), integers(k + 1))
    expected = reference.accepted(*inputs)
    assert torch.equal(accepted(*(tensor.to(DEVICE) for tensor in inputs)).cpu(), expected)
    assert 0 < int(expected.sum()) < int(inputs[3].sum())


def test_certain_and_impossible_drafts():
    seeds = torch.arange(9, device=DEVICE)
    offered = torch.full_like(seeds, 3)
    for rate in (0.0, 1.0):
        rates = torch.full((3,), rate, device=DEVICE)
        assert torch.equal(accepted(rates, seeds, seeds, offered), offered * int(rate))


def test_the_noise_fills_its_range_evenly():
    noise = reference.uniform(torch.arange(100)[:, None], torch.arange(1000))
    counts = torch.histc(noise, bins=10, min=0, max=1)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert counts.min() > 0.97 * noise.numel() / 10

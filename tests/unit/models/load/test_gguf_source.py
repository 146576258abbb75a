"""What comes back of values that llama.cpp's converter changes."""

from __future__ import annotations

import torch

from sametoken.models.load.gguf_source import logarithms


def exponentials(values):
    return values.double().exp().float()


def test_logarithms_in_bf16_come_back_from_any_machine_s_exponentials():
    published = torch.linspace(-12, 12, 4000).bfloat16().float()
    assert published.abs().min() > 2**-13
    exact = exponentials(published)
    others = (exact.nextafter(exact + 1), exact.nextafter(exact - 1), published.exp())
    for decays in (exact, *others):
        assert torch.equal(logarithms(decays), published)
    assert torch.equal(logarithms(torch.tensor([1.0])), torch.zeros(1))


def test_logarithms_in_fp32_come_back_or_have_the_same_exponentials():
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 2
    found = logarithms(exponentials(values))
    assert torch.equal(exponentials(found), exponentials(values))
    large = values.abs() >= 1
    assert torch.equal(found[large], values[large])
    assert not torch.equal(found, values.bfloat16().float())


def test_a_decay_that_is_no_exponential_has_no_logarithm():
    assert not logarithms(torch.tensor([1.0, -2.0])).isfinite().all()
    assert not logarithms(torch.tensor([1.0, 0.0])).isfinite().all()

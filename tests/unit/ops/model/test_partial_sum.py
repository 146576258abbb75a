"""Sums of partial products: in rank order, rounded once, in Triton as in its reference."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.model import partial_sum as reference
from sametoken.ops.model.partial_sum_triton import partial_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_partials(size, rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Of very different magnitudes, so that another order of addition shows.
    scale = 10.0 ** torch.arange(size)[:, None, None]
    return (scale * torch.randn(size, rows, width, generator=generator)).to(DEVICE)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("size", "rows", "width"), [(2, 1, 16), (3, 5, 97), (4, 2, 1500)])
def test_triton_has_the_bits_of_the_reference(size, rows, width, has_bias, dtype):
    partials = random_partials(size, rows, width)
    bias = random_partials(1, 1, width, seed=1)[0, 0].to(dtype) if has_bias else None
    actual = partial_sum(partials, dtype, bias)
    assert actual.dtype == dtype
    assert torch.equal(actual, reference.partial_sum(partials, dtype, bias))
    alone = partial_sum(partials[:, -1:].contiguous(), dtype, bias)
    assert torch.equal(alone, actual[-1:])


def test_no_rows_are_no_launch():
    assert partial_sum(torch.empty(2, 0, 7, device=DEVICE), torch.float32).shape == (0, 7)


def test_the_order_is_that_of_the_ranks():
    partials = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    assert reference.partial_sum(partials, torch.float32).item() == 0.0
    assert reference.partial_sum(partials[[0, 2, 1]], torch.float32).item() == 1.0


def test_it_is_rounded_once_at_the_end():
    # Rounded to bf16 after each addition, the small parts would be lost one by one.
    partials = torch.tensor([256.0, 0.75, 0.75]).view(3, 1, 1)
    assert reference.partial_sum(partials, torch.bfloat16).item() == 258.0

"""Layers over several ranks: every rank gets the same bits, near those of one rank."""

from __future__ import annotations

import pytest
import torch

from helpers.thread_ranks import run_ranks
from sametoken.kernels.reference import ReferenceKernels
from sametoken.layers.linear import Linear, RowParallelLinear
from sametoken.layers.parallel import ALONE, gather_columns

KERNELS = ReferenceKernels()


@pytest.mark.parametrize("width", [1, 2])
def test_columns_are_put_side_by_side_in_rank_order(width):
    whole = torch.arange(12.0 * width).view(3, 4 * width)
    for found in run_ranks(4, lambda p: gather_columns(p, whole[:, p.rank * width :][:, :width])):
        assert torch.equal(found, whole)
        assert found.is_contiguous()


def test_no_rows_are_no_columns():
    assert run_ranks(2, lambda p: gather_columns(p, torch.empty(0, 5)))[1].shape == (0, 10)


def test_one_rank_copies_nothing():
    x = torch.ones(2, 3)
    assert gather_columns(ALONE, x) is x
    assert ALONE.broadcast(x) is x
    assert ALONE.gather(x).shape == (1, 2, 3)


def test_a_row_parallel_linear_sums_in_rank_order():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, generator=generator).to(torch.bfloat16)
    weight = torch.randn(7, 12, generator=generator).to(torch.bfloat16)
    bias = torch.randn(7, generator=generator).to(torch.bfloat16)
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]

    def run(parallel, rows=slice(None)):
        part = parts[parallel.rank]
        share = KERNELS.pack(weight[:, part].clone())
        layer = RowParallelLinear(KERNELS, parallel, share, bias)
        assert layer.nbytes == share.nbytes + bias.nbytes
        return layer(x[rows, part].contiguous())

    found = run_ranks(3, run)
    partial = [x[:, part].float() @ weight[:, part].float().t() for part in parts]
    expected = ((partial[0] + partial[1]) + partial[2] + bias.float()).to(torch.bfloat16)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(one, found[0])
    whole = Linear(KERNELS, KERNELS.pack(weight.clone()), bias)(x)
    torch.testing.assert_close(found[0], whole, rtol=1e-2, atol=1e-2)
    assert torch.equal(run_ranks(3, lambda p: run(p, slice(3, 4)))[0], found[0][3:4])

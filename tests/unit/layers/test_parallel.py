"""Layers over several ranks: every rank gets the same bits, near those of one rank."""

from __future__ import annotations

import pytest
import torch

from helpers.thread_ranks import run_ranks
from sametoken.layers.feed_forward import DividedExperts
from sametoken.layers.linear import Linear, RowParallelLinear
from sametoken.layers.parallel import SINGLE_RANK, gather_columns, of_rank
from sametoken.layers.share import ExpertModules
from sametoken.ops.backend import Routing
from sametoken.ops.model.partial_sum import partial_sum
from sametoken.ops.reference import ReferenceKernels

KERNELS = ReferenceKernels()


@pytest.mark.parametrize("width", [1, 2])
def test_columns_are_put_side_by_side_in_rank_order(width):
    whole = torch.arange(12.0 * width).view(3, 4 * width)
    for found in run_ranks(4, lambda p: gather_columns(p, whole[:, p.rank * width :][:, :width])):
        assert torch.equal(found, whole)
        assert found.is_contiguous()


@pytest.mark.parametrize(("size", "total"), [(2, 7), (3, 10), (4, 5), (4, 9), (4, 4)])
def test_columns_that_ranks_do_not_divide_evenly_come_once(size, total):
    whole = torch.arange(3.0 * total).view(3, total)

    def gathered(parallel):
        own = of_rank(range(total), parallel)
        assert len(own) == -(-total // size)
        return gather_columns(parallel, whole[:, own.start : own.stop], total)

    assert all(torch.equal(found, whole) for found in run_ranks(size, gathered))


def test_no_rows_are_no_columns():
    assert run_ranks(2, lambda p: gather_columns(p, torch.empty(0, 5)))[1].shape == (0, 10)


def test_one_rank_copies_nothing():
    x = torch.ones(2, 3)
    assert gather_columns(SINGLE_RANK, x) is x
    assert SINGLE_RANK.broadcast(x) is x
    assert SINGLE_RANK.gather(x).shape == (1, 2, 3)


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
    whole = Linear(KERNELS.pack(weight.clone()), bias)(x)
    torch.testing.assert_close(found[0], whole, rtol=1e-2, atol=1e-2)
    assert torch.equal(run_ranks(3, lambda p: run(p, slice(3, 4)))[0], found[0][3:4])


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)


def test_divided_experts_are_rounded_once_after_the_sum_over_ranks():
    """Three experts of 12 inner features, 4 of them on each of three ranks."""
    x, gate, up = random(5, 8, seed=1), random(3, 12, 8, seed=2), random(3, 12, 8, seed=3)
    down = random(3, 8, 12, seed=4)
    chosen, weights = KERNELS.moe_gate(random(5, 3, seed=5), Routing(2, True))

    def packed(part):
        fused = [KERNELS.pack(torch.cat((g[part], u[part]))) for g, u in zip(gate, up, strict=True)]
        return KERNELS.pack_experts(fused, [KERNELS.pack(d[:, part].clone()) for d in down])

    parts = [packed(slice(first, first + 4)) for first in (0, 4, 8)]

    def run(parallel, rows=slice(None)):
        modules = ExpertModules.of("experts", 3, 8, 12)
        layer = DividedExperts(KERNELS, parallel, parts[parallel.rank], modules)
        assert layer.nbytes == parts[parallel.rank].nbytes
        return layer(x[rows], chosen[rows], weights[rows])

    found = run_ranks(3, run)
    partials = [part(x, chosen, weights, torch.float32) for part in parts]
    assert all(partial.dtype == torch.float32 for partial in partials)
    for one in found:
        assert torch.equal(one, partial_sum(torch.stack(partials), torch.bfloat16))
    whole = packed(slice(0, 12))(x, chosen, weights)
    torch.testing.assert_close(found[0], whole, rtol=1e-2, atol=1e-2)
    assert torch.equal(run_ranks(3, lambda p: run(p, slice(3, 4)))[0], found[0][3:4])

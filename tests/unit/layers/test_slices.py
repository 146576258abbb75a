"""Rows in slices have the bits of rows in one call."""

from __future__ import annotations

import pytest
import torch

from sametoken.layers import slices
from sametoken.layers.feed_forward import GatedExpert, GatedMLP, RoutedExperts, SparseMoE
from sametoken.layers.linear import Linear
from sametoken.layers.slices import in_slices
from sametoken.ops.backend import Routing
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize, rounded
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import RoundedRows


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def modules(kernels):
    def linear(out_features, in_features):
        return Linear(kernels.pack(random(out_features, in_features)))

    mlp = GatedMLP(linear(40, 12), linear(12, 20))
    gate_up = [kernels.pack(random(16, 12) + i) for i in range(4)]
    down = [kernels.pack(random(12, 8) - i) for i in range(4)]
    experts = kernels.pack_experts(gate_up, down)
    routed = RoutedExperts(kernels, linear(4, 12), experts, Routing(2, True))
    moe = SparseMoE(routed, GatedExpert(kernels, mlp, linear(1, 12)))
    return linear(7, 12), mlp, moe


@pytest.mark.parametrize("kernels", [NativeKernels(), ReferenceKernels()], ids=lambda k: k.name)
def test_slices_change_no_bit(kernels, monkeypatch):
    x = random(23, 12)
    for module in modules(kernels):
        whole = module(x)
        with monkeypatch.context() as patch:
            patch.setattr(slices, "SLICE_ROWS", 5)
            assert torch.equal(module(x), whole)


def test_nor_do_slices_of_rounded_rows(monkeypatch):
    linear = Linear(Fp8Weight(*quantize(random(40, 12))), random(40))
    mlp, x = GatedMLP(linear, Linear(Fp8Weight(*quantize(random(12, 20))))), random(23, 12)
    monkeypatch.setattr(slices, "SLICE_ROWS", 5)
    for module in (linear, mlp):
        assert torch.equal(module(RoundedRows(*rounded(x), x.dtype)), module(x))


def test_a_slice_has_its_rows_and_no_more(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_ROWS", 4)
    seen = []

    def double(rows):
        seen.append(rows.shape[0])
        return rows * 2

    for count in (0, 3, 4, 9):
        assert torch.equal(in_slices(double, random(count, 3)), random(count, 3) * 2)
    assert seen == [0, 3, 4, 4, 4, 1]

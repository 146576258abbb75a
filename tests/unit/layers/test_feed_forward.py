"""The small modules against the formulas they stand for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sametoken.layers.feed_forward import GatedMLP
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.ops.reference import ReferenceKernels

KERNELS = ReferenceKernels()


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_linear_adds_its_bias():
    x, weight, bias = random(5, 12), random(7, 12), random(7)
    linear = Linear(KERNELS.pack(weight), bias)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias))
    assert linear.nbytes == (7 * 12 + 7) * 4
    assert Linear(KERNELS.pack(weight)).nbytes == 7 * 12 * 4


def test_gated_mlp_takes_gate_before_up():
    x, gate, up, down = random(5, 12), random(20, 12), random(21, 12)[1:], random(12, 20)
    fused = KERNELS.pack(torch.cat((gate, up)))
    mlp = GatedMLP(Linear(fused), Linear(KERNELS.pack(down)))
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.testing.assert_close(mlp(x), expected)


def test_norm_after_adding_returns_the_sum():
    x, residual, weight = random(5, 12), random(6, 12)[1:], random(12)
    norm = RMSNorm(KERNELS, weight, 1e-5)
    total = x + residual
    normed, stream = norm.add(x.clone(), residual.clone())
    assert torch.equal(stream, total)
    assert torch.equal(normed, norm(total))
    torch.testing.assert_close(normed, F.rms_norm(total, (12,), weight, 1e-5))

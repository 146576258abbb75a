"""Weights in eight bits among what bundles pack, and the bundle that has none."""

from __future__ import annotations

import pytest
import torch

from sametoken.errors import UnsupportedError
from sametoken.kernels.gemm import eight_bit
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.native.bundle import NativeKernels
from sametoken.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_logits_of_a_weight_in_eight_bits_are_nearly_those_of_the_weight():
    x, matrix = normal(5, 40), normal(24, 40, seed=1)
    packed = KERNELS.pack(matrix.clone())
    weight = KERNELS.eight_bit(packed)
    assert isinstance(weight, EightBitWeight)
    assert weight.nbytes < matrix.nbytes / 3
    got, exact = KERNELS.logits(x, weight), KERNELS.logits(x, packed)
    assert torch.equal(got, eight_bit.logits(x, weight))
    assert 0 < (got - exact).norm() / exact.norm() < 0.05
    assert torch.equal(packed.matrix, matrix)


def test_activations_are_rounded_to_the_nearest_number_of_eight_bits():
    x = normal(4, 300) * 10.0 ** torch.arange(-3, 1)[:, None]
    got = eight_bit.rounded(x).float()
    # Three bits of mantissa; below 2**-6 steps are of one size, 2**-9.
    assert ((got - x).abs() <= (x.abs() / 16).clamp(min=2**-10)).all()
    ties = torch.tensor([1.0625, 1.1875, -1.0625, 2**-10, 3 * 2**-10])
    assert eight_bit.rounded(ties).tolist() == [1.0, 1.25, -1.0, 0.0, 2**-8]


def test_a_row_with_nan_has_no_logits_and_the_others_have_theirs():
    x, weight = normal(5, 40), eight_bit.quantize(normal(24, 40, seed=1))
    expected = eight_bit.logits(x, weight)
    x[2, 7] = torch.nan
    got = eight_bit.logits(x, weight)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], expected[others])


def test_nothing_but_logits_takes_such_a_weight():
    """A token of the target's can therefore not come of one, but by its own logits."""
    weight = KERNELS.eight_bit(KERNELS.pack(normal(24, 40)))
    for use in (KERNELS.linear, KERNELS.gated_linear):
        with pytest.raises(AssertionError, match="EightBitWeight"):
            use(normal(5, 40), weight)
    with pytest.raises(AssertionError, match="EightBitWeight"):
        KERNELS.embedding(torch.tensor([3]), weight)


def test_a_bundle_without_such_products_refuses():
    kernels = NativeKernels()
    with pytest.raises(UnsupportedError, match="the native kernels") as caught:
        kernels.eight_bit(kernels.pack(normal(32, 40)))
    assert "quantization" in caught.value.remedy

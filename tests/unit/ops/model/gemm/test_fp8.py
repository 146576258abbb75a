"""Products in fp8 by the reference, and the backend that has none."""

from __future__ import annotations

import pytest
import torch

from sametoken.errors import UnsupportedError
from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize, rounded, rounded_by
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import Rounding

KERNELS = ReferenceKernels()
FP32 = torch.float32


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_products_with_a_weight_in_fp8_are_nearly_those_of_the_weight():
    x, matrix, bias = normal(5, 40), normal(24, 40, seed=1), normal(24, seed=2)
    packed = KERNELS.pack(matrix.clone())
    weight = packed.quantize_fp8()
    assert isinstance(weight, Fp8Weight)
    assert weight.nbytes < matrix.nbytes / 3
    for got, exact in (
        (weight.matmul(x, out_dtype=FP32), packed.matmul(x, out_dtype=FP32)),
        (weight.matmul(x), packed.matmul(x)),
        (weight.matmul(x, bias), packed.matmul(x, bias)),
        (weight.gated_matmul(x), packed.gated_matmul(x)),
    ):
        assert got.shape == exact.shape
        assert 0 < (got - exact).norm() / exact.norm() < 0.08
    assert torch.equal(packed.matrix, matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_but_fp32_sums_are_rounded_once_to_the_dtype_of_the_activations(dtype):
    x, weight = normal(5, 40).to(dtype), Fp8Weight(*quantize(normal(24, 40, seed=1)))
    bias = normal(24, seed=2).to(dtype)
    sums = weight.matmul(x, out_dtype=FP32)
    assert sums.dtype == FP32
    product = weight.matmul(x)
    assert torch.equal(product, sums.to(dtype))
    assert torch.equal(weight.matmul(x, bias), (sums + bias).to(dtype))
    assert torch.equal(weight.gated_matmul(x), silu_mul(product))


def test_scales_of_powers_are_the_least_that_hold_every_element():
    x = normal(6, 256) * 10.0 ** torch.arange(-3, 3)[:, None]
    x[4, 7], x[5, 200] = 448 * 2.0**20, -(2.0**-90) * 448
    x[5, :200], x[5, 201:] = 0, 0
    rounding = Rounding(grouped=True, powers=True)
    matrix, scale = rounded_by(rounding, x)
    largest = x.double().unflatten(1, (2, 128)).abs().amax(2).clamp(min=2.0**-100)
    assert torch.equal(scale.double(), 2 ** (largest / 448).log2().ceil())
    exact = (x.double() / scale.double().repeat_interleave(128, 1)).float()
    assert torch.equal(matrix.float(), exact.to(torch.float8_e4m3fn).float())
    weight = Fp8Weight(normal(16, 256).to(torch.float8_e4m3fn), torch.ones(16, 2), rounding)
    activations = matrix.double() * scale.double().repeat_interleave(128, 1)
    expected = activations @ weight.matrix.double().t()
    assert torch.allclose(weight.matmul(x).double(), expected, rtol=1e-5, atol=0)


def test_activations_are_rounded_to_the_nearest_number_of_e4m3():
    x = normal(4, 300) * 10.0 ** torch.arange(-3, 1)[:, None]
    x[0, :9] = 0
    matrix, scale = rounded(x)
    assert torch.equal(matrix.float().abs().amax(dim=1), torch.full((4,), 448.0))
    # Three bits of mantissa; below 2**-6 steps are of one size, 2**-9.
    in_steps = x.double() / scale.double()[:, None]
    limit = (in_steps.abs() / 16).clamp(min=2**-10) * (1 + 2**-20)
    assert ((matrix.double() - in_steps).abs() <= limit).all()
    assert not matrix.float()[0, :9].any()


def test_ties_go_to_the_even_number():
    ties = torch.tensor([[448.0, 1.0625, 1.1875, -1.0625, 2**-10, 3 * 2**-10]])
    matrix, scale = rounded(ties)
    assert scale.item() == 1
    assert matrix[0].tolist() == [448.0, 1.0, 1.25, -1.0, 0.0, 2**-8]


def test_a_row_of_zeros_or_of_next_to_nothing_stays_finite():
    x = torch.zeros(3, 40)
    x[1], x[2, 0] = 2.0**-149, -(2.0**-126)
    matrix, scale = rounded(x)
    assert not matrix.float().any()
    assert (scale > 0).all()
    assert not Fp8Weight(*quantize(normal(24, 40))).matmul(x).any()


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_a_row_with_nan_or_an_infinity_has_no_result_and_the_others_have_theirs(what):
    x, weight = normal(5, 40), Fp8Weight(*quantize(normal(24, 40, seed=1)))
    expected = weight.matmul(x, out_dtype=FP32)
    x[2, 7] = what
    got = weight.matmul(x, out_dtype=FP32)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], expected[others])


def test_a_row_cannot_tell_how_many_there_are():
    x = normal(20, 40) * torch.arange(1, 21)[:, None]
    weight = Fp8Weight(*quantize(normal(24, 40)))
    expected = weight.matmul(x)
    for rows in (1, 7, 8, 9):
        assert torch.equal(weight.matmul(x[:rows]), expected[:rows])


def test_embeddings_are_not_of_such_a_weight():
    assert not hasattr(KERNELS.pack(normal(24, 40)).quantize_fp8(), "rows")


def test_a_bundle_without_such_products_refuses():
    kernels = NativeKernels()
    with pytest.raises(UnsupportedError, match="the native kernels") as caught:
        kernels.pack(normal(32, 40)).quantize_fp8()
    assert "quantization" in caught.value.remedy

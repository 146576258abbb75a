"""The C kernels' float8 products against the reference."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import Fp8Matrix, Rounding

ROUNDINGS = [
    None,
    Rounding(),
    Rounding(grouped=True),
    Rounding(scale=torch.tensor(0.01)),
]


def matrix(rows: int, depth: int, by_group: bool, rounding) -> Fp8Matrix:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, depth, generator=generator).to(torch.float8_e4m3fn)
    shape = (rows, -(-depth // 128)) if by_group else (rows,)
    return Fp8Matrix(values, torch.rand(shape, generator=generator) + 0.1, rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("by_group", [False, True])
def test_both_cpu_backends_agree_and_no_row_sees_another(by_group, rounding, dtype):
    given = matrix(38, 300, by_group, rounding)
    x = torch.randn(27, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    native, plain = (
        kernels.pack_fp8(given, dtype) for kernels in (NativeKernels(), ReferenceKernels())
    )
    assert (native.out_features, native.in_features) == (38, 300)
    assert native.nbytes > 38 * 300 * (4 if rounding is None and dtype is torch.float32 else 2)
    bias = torch.arange(38, dtype=dtype)
    for weight in (native, plain):
        whole = weight.matmul(x, bias)
        for rows in (slice(0, 1), slice(3, 16), slice(20, 27)):
            assert torch.equal(weight.matmul(x[rows], bias), whole[rows])
    sums = native.matmul(x, out_dtype=torch.float32)
    assert torch.allclose(sums, plain.matmul(x, out_dtype=torch.float32), rtol=1e-4, atol=1e-3)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    assert torch.allclose(
        native.gated_matmul(x).float(),
        plain.gated_matmul(x).float(),
        rtol=tolerance,
        atol=tolerance,
    )

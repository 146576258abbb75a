"""Products with 4-bit weights: every form against the expanded matrix, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.model.gemm.int4 import Int4Weight, integers, packed_int4
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import Int4Matrix

SHAPES = [(1, 16, 64, 32), (5, 74, 128, 64), (33, 50, 256, 128), (19, 70, 96, 32)]


def poisoned(x: torch.Tensor, poison) -> torch.Tensor:
    """The same tensor with poison before and after it."""
    memory = torch.full((x.numel() + 512,), poison, dtype=x.dtype)
    memory[256 : 256 + x.numel()] = x.flatten()
    return memory[256 : 256 + x.numel()].view(x.shape)


def made(features: int, depth: int, width: int, permuted: bool = False, exact: bool = True):
    """A matrix, and what it stands for in float64."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (features, depth), generator=generator, dtype=torch.uint8)
    shape = (features, depth // width)
    zero = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-12, -8, shape, generator=generator)
    if not exact:
        scale = torch.rand(shape, generator=generator) + 0.01
    order = torch.randperm(depth, generator=generator) if permuted else None
    expanded = (
        values.double() - zero.repeat_interleave(width, 1)
    ) * scale.double().repeat_interleave(width, 1)
    if order is not None:
        expanded = torch.empty_like(expanded).index_copy_(1, order, expanded)
    matrix = Int4Matrix(
        poisoned(packed_int4(values, width), 255),
        poisoned(scale, torch.nan),
        poisoned(zero, 200),
        order,
    )
    return matrix, expanded


def whole_numbers(rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return poisoned(torch.randint(-4, 5, (rows, depth), generator=generator).float(), torch.nan)


def forms(matrix: Int4Matrix, dtype=torch.float32):
    return (
        Int4Weight(matrix),
        Int4DeviceWeight(matrix),
        NativeKernels().pack_int4(matrix, dtype),
    )


def test_bytes_hold_the_two_halves_of_a_group():
    values = torch.arange(64, dtype=torch.uint8)[None] % 16
    matrix = Int4Matrix(packed_int4(values, 32), torch.ones(1, 2), torch.zeros(1, 2).byte())
    assert matrix.width == 32
    for group in range(2):
        assert integers(matrix, group).tolist() == [[*range(16), *range(16)]]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("rows", "features", "depth", "width"), SHAPES)
def test_every_form_gives_the_exact_product(rows, features, depth, width, permuted):
    matrix, expanded = made(features, depth, width, permuted)
    x, bias = whole_numbers(rows, depth), torch.arange(features).float()
    exact = x.double() @ expanded.T
    gate, up = exact.chunk(2, dim=1)
    for weight in forms(matrix):
        assert (weight.out_features, weight.in_features) == (features, depth)
        assert torch.equal(weight.matmul(x, out_dtype=torch.float32), exact.float())
        assert torch.equal(weight.matmul(x, bias), (exact + bias).float())
        assert torch.equal(weight.matmul(x[-1:].contiguous()), exact[-1:].float())
        expected = (torch.nn.functional.silu(gate) * up).float()
        assert torch.allclose(weight.gated_matmul(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_sees_another(dtype):
    """The C kernels and the reference; tests/gpu/test_fp8_gpu.py has the chip's."""
    matrix, expanded = made(40, 128, 32, exact=False)
    x = torch.randn(37, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    for weight in (Int4Weight(matrix), NativeKernels().pack_int4(matrix, dtype)):
        whole = weight.matmul(x)
        for rows in (slice(0, 1), slice(4, 21), slice(30, 37)):
            assert torch.equal(weight.matmul(x[rows].contiguous()), whole[rows])
        error = (whole.double() - x.double() @ expanded.T).norm() / whole.double().norm()
        assert error < (1e-6 if dtype is torch.float32 else 4e-3)


def test_memory_is_half_a_byte_a_weight_and_its_scales():
    matrix, _ = made(16, 256, 128)
    weight = ReferenceKernels().pack_int4(matrix, torch.float32)
    assert weight.nbytes == 16 * 128 + 16 * 2 * 5


def test_the_kernel_compiles_to_tensor_core_products(tmp_path):
    code = """
from sametoken.ops.model.gemm.int4_triton import Int4DeviceWeight
from sametoken.ops.weight import Int4Matrix
def weight(n, k, width):
    groups = (n, k // width)
    scale = torch.empty(groups, dtype=torch.float16)
    return Int4DeviceWeight(
        Int4Matrix(torch.empty(n, k // 2, dtype=torch.uint8), scale, scale.byte())
    )
for rows in (1, 64):
    x = torch.empty(rows, 4096, dtype=torch.bfloat16)
    weight(6144, 4096, 128).matmul(x)
    weight(6144, 4096, 32).gated_matmul(x)
"""
    compile_launches(code, tmp_path)
    kernels = [file.read_text() for file in tmp_path.rglob("_int4_kernel.ptx")]
    assert len(kernels) == 4
    assert all("bf16" in kernel and "mma" in kernel for kernel in kernels)

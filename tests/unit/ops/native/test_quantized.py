"""Products of quantized weights in C: against the reference, and rows that see no other row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.budgets import resident_bytes
from sametoken.ops.model.gemm.fp8 import rounded_by
from sametoken.ops.model.gemm.int4 import packed_int4
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, Rounding

pytestmark = pytest.mark.usefixtures("poisoned_memory")
native, reference = NativeKernels(), ReferenceKernels()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDINGS = [
    None,
    Rounding(),
    Rounding(grouped=True),
    Rounding(grouped=True, powers=True),
    Rounding(scale=torch.tensor(0.01)),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fp8_matrix(rows: int, depth: int, by_group: bool = False, rounding=None) -> Fp8Matrix:
    values = torch.randn(rows, depth, generator=seeded(0)).to(torch.float8_e4m3fn)
    shape = (rows, -(-depth // 128)) if by_group else (rows,)
    return Fp8Matrix(values, torch.rand(shape, generator=seeded(1)) + 0.1, rounding)


def int4_matrix(rows: int, depth: int, width: int, scales=FP16, symmetric: bool = False):
    """A matrix, and what it stands for in float64."""
    generator = seeded(0)
    values = torch.randint(0, 16, (rows, depth), generator=generator, dtype=torch.uint8)
    shape = (rows, depth // width)
    zero = torch.randint(0, 17, shape, generator=generator, dtype=torch.uint8)
    zero = torch.full_like(zero, 8) if symmetric else zero
    scale = ((torch.rand(shape, generator=generator) - 0.5) / 16).to(scales)
    differences = values.double() - zero.double().repeat_interleave(width, 1)
    exact = differences * scale.double().repeat_interleave(width, 1)
    return Int4Matrix(packed_int4(values, width), scale, zero), exact


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("by_group", [False, True])
def test_both_cpu_backends_agree_on_float8(by_group, rounding, dtype):
    given = fp8_matrix(38, 301, by_group, rounding)
    x = torch.randn(27, 301, generator=seeded(2)).to(dtype)
    ours, plain = (kernels.pack_fp8(given, dtype) for kernels in (native, reference))
    assert (ours.out_features, ours.in_features) == (38, 301)
    bias = torch.arange(38, dtype=dtype)
    tolerance = 1e-4 if dtype is FP32 else 2**-7
    torch.testing.assert_close(
        ours.matmul(x, bias), plain.matmul(x, bias), rtol=tolerance, atol=tolerance
    )
    sums = [one.matmul(x, out_dtype=FP32) for one in (ours, plain)]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        ours.gated_matmul(x), plain.gated_matmul(x), rtol=4 * tolerance, atol=4 * tolerance
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("scales", [FP32, FP16, BF16])
@pytest.mark.parametrize(("width", "symmetric"), [(32, False), (64, True), (128, False)])
def test_products_of_four_bits_on_a_cpu(width, symmetric, scales, dtype):
    """The reference rounds elements to the dtype of activations, as a GPU does; C does not."""
    given, exact = int4_matrix(38, 384, width, scales, symmetric)
    x = torch.randn(27, 384, generator=seeded(2)).to(dtype)
    for kernels, elements in ((native, exact), (reference, exact.float().to(dtype).double())):
        found = kernels.pack_int4(given, dtype).matmul(x, out_dtype=FP32)
        torch.testing.assert_close(found.double(), x.double() @ elements.T, rtol=1e-5, atol=1e-4)


FORMS = {
    "float8 by row": lambda: native.pack_fp8(fp8_matrix(70, 301), BF16),
    "float8 in blocks": lambda: native.pack_fp8(
        fp8_matrix(70, 301, True, Rounding(grouped=True)), BF16
    ),
    "float8, rows rounded": lambda: native.pack_fp8(fp8_matrix(70, 301, False, Rounding()), BF16),
    "4 bits": lambda: native.pack_int4(int4_matrix(70, 320, 32)[0], BF16),
    "4 bits, symmetric": lambda: native.pack_int4(int4_matrix(70, 320, 64, BF16, True)[0], BF16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    form, dtype, one_thread
):
    weight = FORMS[form]()
    x = torch.randn(70, weight.in_features, generator=seeded(3)).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([weight.matmul(row[None].clone(), out_dtype=FP32) for row in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 3, 4, 5, 6, 7, 13, 47, 48, 49, 70):
            for first in {0, 70 - count}:
                rows = slice(first, first + count)
                found = weight.matmul(x[rows].clone(), out_dtype=FP32)
                assert torch.equal(found, alone[rows])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite_spoils_no_other(form, bad):
    weight = FORMS[form]()
    x = torch.randn(9, weight.in_features, generator=seeded(4)).to(BF16)
    wanted = weight.matmul(x)
    x[4, 7] = bad
    found = weight.matmul(x)
    assert not found[4].isfinite().any()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[kept], wanted[kept])


def in_a_thread(function):
    """The result of a function in a thread that has called nothing before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("form", FORMS)
def test_a_thread_may_begin_with_no_rows(form):
    """A chunk of a prompt samples nothing: the first product of a head may have no rows."""
    weight = FORMS[form]()
    x = torch.empty(0, weight.in_features)
    assert in_a_thread(lambda: weight.matmul(x)).shape == (0, 70)


def test_memory_of_a_thread_ends_with_it():
    """Threads may share an engine: a server may start one for every request."""
    weight = native.pack_fp8(fp8_matrix(8, 8192), BF16)
    x = torch.ones(48, 8192)

    in_a_thread(lambda: weight.matmul(x))
    before = resident_bytes()
    for _ in range(60):
        in_a_thread(lambda: weight.matmul(x))
    assert resident_bytes() - before < 20 * x.nbytes


@pytest.mark.parametrize("rows", [1, 4, 48])
def test_every_number_of_float8_is_read_exactly(rows):
    codes = torch.tensor([i for i in range(256) if i & 127 != 127], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    scale = torch.tensor([0.7, 2.0**-100, 3e30])
    matrix = Fp8Matrix(values.expand(3, -1).contiguous(), scale, None)
    weight = native.pack_fp8(matrix, FP32)
    eye = torch.eye(codes.numel())
    found = torch.cat([weight.matmul(part.contiguous()) for part in eye.split(rows)])
    assert torch.equal(found, values.float()[:, None] * scale)


@pytest.mark.parametrize("rounding", ROUNDINGS[1:])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_activations_are_rounded_as_the_reference_rounds_them(rounding, dtype):
    """Against a matrix of ones on the diagonal, whose products are the rounded activations."""
    x = torch.randn(64, 200, generator=seeded(5)) * 10.0 ** torch.arange(-6, 2).repeat(25)
    x = torch.cat((x, torch.zeros(1, 200), x[:1] * 1e-40)).to(dtype)
    eye = Fp8Matrix(torch.eye(200).to(torch.float8_e4m3fn), torch.ones(200), rounding)
    found = native.pack_fp8(eye, dtype).matmul(x, out_dtype=FP32)
    values, scale = rounded_by(rounding, x)
    by_feature = scale.view(len(x), -1).repeat_interleave(128 if scale.dim() == 2 else 200, dim=1)
    assert torch.equal(found, values.float() * by_feature[:, :200])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scales", [FP16, BF16])
def test_four_bits_are_multiplied_out_exactly(scales, symmetric):
    given, exact = int4_matrix(38, 128, 32, scales, symmetric)
    weight = native.pack_int4(given, FP32)
    for part in torch.eye(128).split(5):
        found = weight.matmul(part.contiguous()).double()
        assert torch.equal(found, part.double() @ exact.T)


@pytest.mark.parametrize("value", [0.0, 2.0**-24, 2.0**-14 - 2.0**-24, 2.0**-14, 65504.0, -1.5])
def test_scales_of_16_bits_are_read_exactly(value):
    given = Int4Matrix(
        packed_int4(torch.full((1, 32), 9, dtype=torch.uint8), 32),
        torch.full((1, 1), value, dtype=FP16),
        torch.full((1, 1), 8, dtype=torch.uint8),
    )
    found = native.pack_int4(given, FP32).matmul(torch.eye(32))
    assert torch.equal(found, torch.full((32, 1), value))


def test_weights_take_the_bytes_of_their_bits():
    assert native.pack_fp8(fp8_matrix(64, 256), BF16).nbytes == 64 * (256 + 4)
    symmetric, _ = int4_matrix(64, 256, 32, BF16, symmetric=True)
    assert native.pack_int4(symmetric, BF16).nbytes == 64 * (128 + 8 * 2)
    zeros, _ = int4_matrix(64, 256, 32, FP32)
    assert native.pack_int4(zeros, BF16).nbytes == 64 * (128 + 8 * (4 + 1))

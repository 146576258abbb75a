"""Products of integers with rounded activations in C: the bits of the reference, in any batch."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

from sametoken.errors import InvariantError
from sametoken.ops.model.gemm.int4 import expanded
from sametoken.ops.model.gemm.integers import product
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.build import FLAGS, SOURCE_DIRECTORY, find_compiler
from sametoken.ops.native.library import NativeLibrary, WeightMemory, _typed
from sametoken.ops.native.weights import pack_integers
from sametoken.ops.weight import IntegerMatrix

pytestmark = pytest.mark.usefixtures("poisoned_memory")
native = NativeKernels()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Bits, features of a group, dtype of scales, zero; None: minima.
FORMS = {
    "Q4_0": (4, 32, FP16, 8),
    "Q4_1": (4, 32, FP16, None),
    "Q8_0": (8, 32, FP16, 128),
    "Q4_K": (4, 32, FP32, None),
    "Q5_K": (5, 32, FP32, None),
    "Q6_K": (6, 16, FP32, 32),
    "bf16 scales": (4, 32, BF16, None),
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 47, 48, 49, 70)


def made(name: str, rows: int, depth: int) -> IntegerMatrix:
    bits, width, dtype, zero = FORMS[name]
    generator, shape = torch.Generator().manual_seed(0), (rows, depth // width)
    codes = torch.randint(0, 2**bits, (rows, depth), generator=generator, dtype=torch.uint8)
    scale = ((torch.rand(shape, generator=generator) - 0.3) / 64).to(dtype)
    minimum = -torch.rand(shape, generator=generator).to(dtype) if zero is None else None
    return IntegerMatrix(codes, bits, scale, zero or 0, minimum)


def activations(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes, with halves of a step, and groups that are 0 or too small to be rounded."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, depth, generator=generator)
    x *= 10.0 ** torch.randint(-4, 3, (rows, 1), generator=generator)
    x[0] = (torch.arange(depth) % 32 - 15.5) * (127 / 15.5)
    x[rows // 2, : depth // 2] = 0.0
    x[-1, 16:48] *= 1e-36
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("rows", "depth"),
    # One tile by its rows, and several.
    [(1, 32), (2, 96), (3, 64), (4, 32), (5, 96), (6, 64), (7, 32), (8, 96), (33, 96), (70, 320)],
)
def test_products_have_the_bits_of_the_reference(rows, depth, name, dtype):
    matrix = made(name, rows, depth)
    weight = native.pack_integers(matrix, dtype)
    x, bias = activations(70, depth, dtype), torch.randn(rows).to(dtype)
    wanted = product(x, matrix)
    assert wanted.isfinite().all()
    for count in ROWS:
        found = weight.matmul(x[-count:].clone(), out_dtype=FP32)
        assert torch.equal(found, wanted[-count:])
    assert torch.equal(weight.matmul(x), wanted.to(dtype))
    assert torch.equal(weight.matmul(x, bias), (wanted + bias.float()).to(dtype))


def test_a_last_group_of_activations_may_have_16_features():
    matrix = made("Q6_K", 38, 48)
    x = activations(9, 48, FP32)
    assert torch.equal(native.pack_integers(matrix, FP32).matmul(x), product(x, matrix))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K"])
def test_threads_change_no_bit(name, one_thread):
    matrix, x = made(name, 70, 320), activations(70, 320, BF16)
    weight, wanted = native.pack_integers(matrix, BF16), product(x, matrix)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(weight.matmul(x, out_dtype=FP32), wanted)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K"])
def test_the_largest_codes_do_not_overflow(name, sign):
    """All products of a group have the largest size, and one sign."""
    bits, width, _, zero = FORMS[name]
    scale = torch.ones(2, 64 // width)
    codes = torch.tensor([[0], [2**bits - 1]], dtype=torch.uint8).expand(2, 64).contiguous()
    matrix = IntegerMatrix(codes, bits, scale, zero or 0, scale if zero is None else None)
    x = torch.full((5, 64), 127.0 * sign)
    found = native.pack_integers(matrix, FP32).matmul(x)
    assert torch.equal(found, x @ expanded(matrix).T)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_that_is_not_finite_is_nan_and_spoils_no_other(name, bad):
    matrix = made(name, 70, 320)
    weight, x = native.pack_integers(matrix, BF16), activations(9, 320, BF16)
    wanted = weight.matmul(x)
    x[4, 7] = bad
    found = weight.matmul(x)
    assert found[4].isnan().all()
    assert product(x, matrix)[4].isnan().all()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[kept], wanted[kept])


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_elements(name):
    matrix = made(name, 70, 96)
    ids, wanted = torch.tensor([69, 0, 5, 5, 33]), expanded(matrix)
    assert torch.equal(native.pack_integers(matrix, FP32).rows(ids), wanted[ids])
    assert torch.equal(native.pack_integers(matrix, BF16).rows(ids), wanted[ids].bfloat16())
    for outside in (-1, 70):
        with pytest.raises(InvariantError, match=r"outside the vocabulary 0\.\.69"):
            native.pack_integers(matrix, FP32).rows(torch.tensor([0, outside]))


@pytest.mark.parametrize(("bits", "width", "zero"), [(4, 16, 8), (8, 32, 0), (5, 64, 16)])
def test_other_forms_are_refused(bits, width, zero):
    codes, scale = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 64 // width)
    with pytest.raises(InvariantError, match=rf"no product of {bits} bits by groups of {width}"):
        native.pack_integers(IntegerMatrix(codes, bits, scale, zero), FP32)


@pytest.fixture(scope="module")
def generic(tmp_path_factory):
    """The C kernels as the compiler makes them for any CPU of the architecture, and one thread."""
    path = tmp_path_factory.mktemp("generic") / "integers.so"
    sources = [str(SOURCE_DIRECTORY / name) for name in ("integers.c", "threads.c")]
    # -O0, which compiles faster: no bit depends on it.
    command = [*find_compiler(), *FLAGS, "-O0", "-shared", *sources, "-lm", "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    hints = get_type_hints(NativeLibrary, include_extras=True).items()
    found = {name: _typed(library, name, hint) for name, hint in hints if "integer" in name}
    return SimpleNamespace(**found)


@pytest.mark.parametrize("name", FORMS)
def test_a_cpu_without_those_instructions_gives_the_same_bits(generic, name):
    matrix, x = made(name, 38, 320), activations(70, 320, FP32)
    weight = pack_integers(generic, WeightMemory(lambda *_: None, 1 << 20), matrix, FP32)
    wanted = product(x, matrix)
    for count in ROWS:
        assert torch.equal(weight.matmul(x[-count:].clone()), wanted[-count:])
    ids = torch.tensor([37, 0])
    assert torch.equal(weight.rows(ids), expanded(matrix)[ids])

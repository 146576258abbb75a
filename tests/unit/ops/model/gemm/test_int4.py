"""Products with 4-bit weights: every form against the expanded matrix, in poisoned memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned
from sametoken.errors import InvariantError
from sametoken.models.in_place import Replacement
from sametoken.ops.model.gemm import selfcheck
from sametoken.ops.model.gemm.int4 import Int4Weight, elements, expanded, numbers, packed_int4
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import FEW_ROWS, Int4DeviceWeight, product
from sametoken.ops.model.gemm.tuning import (
    CublasConfig,
    GemmShape,
    GemmTable,
    StreamedConfig,
)
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels
from sametoken.ops.weight import Int4Matrix, IntegerMatrix

SHAPES = [(1, 16, 64, 32), (5, 74, 128, 64), (33, 50, 256, 128), (19, 70, 96, 32), (3, 22, 144, 16)]


#: Of e2m1, by its code.
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def made(
    features: int,
    depth: int,
    width: int,
    permuted: bool = False,
    exact: bool = True,
    e2m1: bool = False,
):
    """A matrix, and what it stands for in float64."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (features, depth), generator=generator, dtype=torch.uint8)
    shape = (features, depth // width)
    # GPTQ has zeros of 16.
    zero = torch.randint(0, 17, shape, generator=generator, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-12, -8, shape, generator=generator)
    if not exact:
        scale = torch.rand(shape, generator=generator) + 0.01
    order = torch.randperm(depth, generator=generator) if permuted else None
    meant = values.double() - zero.repeat_interleave(width, 1)
    if e2m1:
        meant = NUMBERS.double()[values.int()]
    expanded = meant * scale.double().repeat_interleave(width, 1)
    if order is not None:
        expanded = torch.empty_like(expanded).index_copy_(1, order, expanded)
    matrix = Int4Matrix(
        poisoned(packed_int4(values, width), 255),
        poisoned(scale),
        None if e2m1 else poisoned(zero, 200),
        order,
    )
    return matrix, expanded


def whole_numbers(rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return poisoned(torch.randint(-4, 5, (rows, depth), generator=generator).float())


def forms(matrix: Int4Matrix, dtype=torch.float32):
    return (
        Int4Weight(matrix),
        Int4DeviceWeight.of(matrix),
        NativeKernels().pack_int4(matrix, dtype),
    )


def test_bytes_hold_the_two_halves_of_a_group():
    values = torch.arange(64, dtype=torch.uint8)[None] % 16
    matrix = Int4Matrix(packed_int4(values, 32), torch.ones(1, 2), torch.zeros(1, 2).byte())
    assert matrix.width == 32
    assert numbers(matrix).tolist() == [[*range(16)] * 4]


@pytest.mark.parametrize(("permuted", "e2m1"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("rows", "features", "depth", "width"), SHAPES)
def test_every_form_gives_the_exact_product(rows, features, depth, width, permuted, e2m1):
    matrix, expanded = made(features, depth, width, permuted, e2m1=e2m1)
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


@pytest.mark.parametrize("e2m1", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_sees_another(dtype, e2m1):
    """The C kernels and the reference; tests/gpu/test_quantized_gpu.py has the chip's."""
    matrix, expanded = made(40, 128, 32, exact=False, e2m1=e2m1)
    x = torch.randn(37, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    for weight in (Int4Weight(matrix), NativeKernels().pack_int4(matrix, dtype)):
        whole = weight.matmul(x)
        for rows in (slice(0, 1), slice(4, 21), slice(30, 37)):
            assert torch.equal(weight.matmul(x[rows].contiguous()), whole[rows])
        error = (whole.double() - x.double() @ expanded.T).norm() / whole.double().norm()
        assert error < (1e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("e2m1", [False, True])
@pytest.mark.parametrize(("rows", "features", "depth", "width"), SHAPES)
def test_elements_made_in_registers_give_the_exact_product(rows, features, depth, width, e2m1):
    matrix, expanded = made(features, depth, width, e2m1=e2m1)
    panels = Int4DeviceWeight.of(matrix).panels
    x, bias = whole_numbers(rows, depth), torch.arange(features).float()
    exact = x.double() @ expanded.T
    gate, up = exact.chunk(2, dim=1)
    assert torch.equal(product(x, panels, "logits"), exact.float())
    assert torch.equal(product(x, panels, "bias", bias), (exact + bias).float())
    expected = (torch.nn.functional.silu(gate) * up).float()
    assert torch.allclose(product(x, panels, "silu_mul"), expected, rtol=1e-5, atol=1e-5)


def in_poison(weight: Int4DeviceWeight) -> Int4DeviceWeight:
    """The same weight, with poison around what the kernels read."""
    panels, parts = weight.panels, {}
    for name in ("words", "tops", "scales", "offsets", "factors"):
        part = getattr(panels, name)
        if part is not None:
            parts[name] = poisoned(part, torch.nan if part.is_floating_point() else -1)
    return replace(weight, panels=replace(panels, **parts))


@pytest.mark.parametrize(
    ("bits", "width", "minima"),
    [(4, 32, False), (4, 32, True), (5, 32, True), (6, 16, False), (8, 32, False)],
)
def test_integers_in_planes_give_the_exact_product(bits, width, minima):
    generator, shape = torch.Generator().manual_seed(3), (38, 160 // width)
    codes = torch.randint(0, 2**bits, (38, 160), generator=generator, dtype=torch.uint8)
    scale, minimum = (2.0 ** torch.randint(-9, -5, shape, generator=generator) for _ in range(2))
    matrix = IntegerMatrix(codes, bits, scale, 1 << bits - 1, -minimum if minima else None)
    weight, meant = in_poison(Int4DeviceWeight.of(matrix, dtype=torch.float32)), expanded(matrix)
    assert torch.equal(weight.panels.expanded(torch.float32), meant)
    ids = torch.tensor([37, 0, 5, 5])
    assert torch.equal(weight.rows(ids), meant[ids])
    assert torch.equal(weight.cut(ids).panels.expanded(torch.float32), meant[ids])
    assert weight.quantize_fp8() is weight
    x, bias = whole_numbers(35, 160), torch.arange(38).float()
    exact = x.double() @ meant.double().T
    for rows in (1, 5, 35):
        some = x[:rows].contiguous()
        assert torch.equal(product(some, weight.panels, "logits"), exact[:rows].float())
        assert torch.equal(weight.matmul(some, bias), (exact[:rows] + bias).float())
    gate, up = exact.chunk(2, dim=1)
    gated = (torch.nn.functional.silu(gate) * up).float()
    assert torch.allclose(product(x, weight.panels, "silu_mul"), gated, rtol=1e-5, atol=1e-5)


def test_the_start_up_check_proves_each_form_of_one_shape():
    """As q and v have in files of mixed types; a form that is there twice is proven once."""
    kernels = TritonKernels(GemmTable())
    codes, scale = torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 4)
    forms = [(codes, 4, scale, 8), (codes, 4, scale, 8), (codes, 4, scale, 0, -scale)]
    forms += [(codes, 5, scale, 0, -scale), (codes, 6, torch.ones(64, 8), 32)]
    forms += [(codes, 8, scale, 128), (codes, 8, scale.half(), 128)]
    kept = [kernels.pack_integers(IntegerMatrix(*one), torch.float16) for one in forms]
    cpu = torch.device("cpu")
    assert kernels.prove_quantized((1,), torch.float16, cpu) == len(kept) - 1


def test_no_expanded_matrix_is_multiplied_by_a_kernel_that_reads_it_early(monkeypatch):
    """That kernel waits for the rows alone, and an expanded matrix is written just before."""
    table = GemmTable(hopper=True)
    gated = (GemmShape(2 * features, 4096, "silu_mul") for features in (6144, 12288, 14336))
    for shape in (*gated, GemmShape(64, 128), GemmShape(4096, 12288)):
        for rows in range(FEW_ROWS + 1, 2049):
            assert not isinstance(table.choose(shape, rows), StreamedConfig)

    kernels, ran = TritonKernels(GemmTable(hopper=True)), []
    monkeypatch.setattr(
        selfcheck,
        "product",
        lambda config, x, matrix, *_: ran.append((config, len(x))) or x.new_zeros(len(x), 1),
    )
    matrix, _ = made(64, 128, 32)
    weight = kernels.pack_int4(matrix, torch.float16)
    counts = (1, 64, 128, FEW_ROWS + 1, 256)
    kernels.table.choose(GemmShape(64, 128), 256)
    kernels.run_candidates(counts, torch.float16)
    (report,) = kernels.prove(counts, torch.float16)
    assert report.shape == GemmShape(weight.out_features, weight.in_features)
    assert not any(isinstance(config, StreamedConfig) for config, _ in ran)
    compared = {rows for config, rows in ran if isinstance(config, CublasConfig)}
    assert compared == {1, FEW_ROWS + 1, 256}
    kernels.run_candidates((1, 64), torch.float16)
    assert kernels.prove((1, 64), torch.float16) == ()


@pytest.mark.parametrize(
    ("dtype", "scales", "zeros", "width"),
    [
        (torch.float32, torch.float32, True, 128),
        (torch.float32, torch.float16, False, 64),
        (torch.float16, torch.float32, False, 32),
        (torch.float16, torch.float16, True, 16),
        (torch.float16, torch.float16, True, 64),
        (torch.float16, torch.float16, False, 32),
        (torch.float16, torch.float16, False, 128),
    ],
)
def test_many_rows_have_the_product_of_the_elements_and_few_rows_too(dtype, scales, zeros, width):
    """numpy has no bf16: fp16 stands in, whose elements are made in pairs if scales have it too."""
    matrix, _ = made(74, 384, width, exact=False)
    zero = matrix.zero if zeros else torch.full_like(matrix.zero, 8)
    matrix = replace(matrix, scale=matrix.scale.to(scales), zero=zero)
    weight, plain = Int4DeviceWeight.of(matrix, dtype=dtype), elements(matrix, dtype)
    assert (weight.panels.paired is not None) == (dtype == scales == torch.float16)
    assert (weight.panels.offsets is None) == (not zeros)
    assert torch.equal(weight.panels.expanded(dtype), plain)
    # One-hot rows: the sum of one element.
    x = torch.eye(384, dtype=dtype)
    for rows in (FEW_ROWS, 384):
        found = weight.matmul(x[-rows:].contiguous(), out_dtype=torch.float32)
        assert torch.equal(found, plain.T[-rows:].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 32, 128])
def test_elements_made_in_pairs_are_rounded_once(dtype, width):
    """Cut, and of two matrices in one stack, only one of which has zeros of its own."""
    matrix, _ = made(70, 384, width, exact=False)
    matrix = replace(matrix, scale=matrix.scale.to(dtype))
    plain = replace(matrix, zero=torch.full_like(matrix.zero, 8))
    both = [Int4Panels.of(one, dtype) for one in (matrix, plain)]
    assert [one.paired for one in both] == [dtype, dtype]
    stacked, some = Int4Panels.stacked(both), torch.tensor([3, 69, 7])
    for index, one in enumerate((matrix, plain)):
        parts = {name: getattr(stacked, name)[index] for name in ("words", "scales", "offsets")}
        meant = elements(one, dtype)
        assert torch.equal(both[index].expanded(dtype), meant)
        assert torch.equal(replace(stacked, **parts).expanded(dtype), meant)
        assert torch.equal(both[index].cut(some).expanded(dtype), meant[some])


@pytest.mark.parametrize("power", [-127, -126, 0, 125])
def test_numbers_of_e2m1_are_exact_at_every_scale(power):
    values = torch.arange(32, dtype=torch.uint8)[None] % 16
    scale = torch.full((1, 1), 2.0**power)
    meant = (NUMBERS.repeat(2) * 2.0**power)[:, None]
    for scales in (scale, scale.to(torch.float8_e8m0fnu)):
        for weight in forms(Int4Matrix(packed_int4(values, 32), scales, None)):
            assert torch.equal(weight.matmul(torch.eye(32)), meant)


@pytest.mark.parametrize(("least", "most"), [(0, 128), (8, 252)])
def test_bytes_of_e8m0_are_a_quarter_of_a_bit_a_weight_and_give_the_elements(least, most):
    """Every byte between with every code, in rows of nine groups, a block's and more.

    Up to 128, for 2, bf16 holds what makes an element at once. Else the interpreter rounds
    subnormal elements to 0.
    """
    values = ((torch.arange(64)[:, None] + torch.arange(288)) % 16).to(torch.uint8)
    powers = (torch.arange(64 * 9) % (most + 1 - least) + least).to(torch.uint8)
    scale = powers.view(64, 9).view(torch.float8_e8m0fnu)
    matrix = Int4Matrix(packed_int4(values, 32), scale, None)
    panels = Int4Panels.of(matrix, torch.float32)
    assert panels.width == 32
    assert panels.e2m1_kind == (2 if most == 128 else 1)
    assert panels.nbytes * 8 == 64 * 384 * 4.25
    some = torch.tensor([3, 60, 7])
    for dtype in (torch.float32, torch.bfloat16):
        meant = elements(matrix, dtype)
        assert torch.equal(panels.expanded(dtype).view(torch.uint8), meant.view(torch.uint8))
        assert torch.equal(panels.cut(some).expanded(dtype), meant[some])


def test_new_scales_above_2_do_not_take_the_place_of_smaller_ones():
    """The kernel that runs would make other elements of them."""
    values = packed_int4(torch.ones(4, 128, dtype=torch.uint8), 32)
    live, same, larger = (
        Int4Panels.of(
            Int4Matrix(values, torch.full((4, 4), scale).to(torch.float8_e8m0fnu), None),
            torch.bfloat16,
        )
        for scale in (2.0, 0.5, 4.0)
    )
    Replacement.of(live, same).write()
    assert (live.expanded(torch.bfloat16) == 0.25).all()
    with pytest.raises(InvariantError, match=r"scales is .*uint32.*the new one .*int32"):
        Replacement.of(live, larger)


def with_factors(features: int, depth: int, factor: torch.Tensor, least=0, most=127):
    """A matrix of e2m1 with scales of e4m3 and factors by row, as NVFP4 has."""
    generator, shape = torch.Generator().manual_seed(5), (features, depth // 16)
    values = torch.randint(0, 16, (features, depth), generator=generator, dtype=torch.uint8)
    scale = torch.randint(least, most, shape, generator=generator).to(torch.uint8)
    scale[0, :3] = torch.tensor([least, (least + most) // 2, most - 1])
    packed = packed_int4(values, 16)
    return Int4Matrix(packed, scale.view(torch.float8_e4m3fn), None, factor=factor)


@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 50, 128), (5, 70, 144), (40, 22, 400)])
def test_scales_with_factors_give_the_exact_product(rows, features, depth):
    factor = 2.0 ** (torch.arange(features) % 9 - 4)
    matrix = with_factors(features, depth, poisoned(factor), 0x2C, 0x4C)
    values = torch.cat(((part := matrix.values.unflatten(1, (-1, 8))) & 15, part >> 4), 2).int()
    scale = matrix.scale.double() * factor[:, None].double()
    meant = (NUMBERS.double()[values] * scale[:, :, None]).flatten(1)
    x = whole_numbers(rows, depth)
    exact = x.double() @ meant.T
    for weight in (*forms(matrix), in_poison(Int4DeviceWeight.of(matrix))):
        assert torch.equal(weight.matmul(x, out_dtype=torch.float32), exact.float())
    panels = in_poison(Int4DeviceWeight.of(matrix)).panels
    assert torch.equal(product(x, panels, "logits"), exact.float())


def test_every_scale_of_e4m3_and_factor_gives_the_element_in_every_form():
    """Subnormal scales and the largest; factors whose products with elements are rounded."""
    factor = torch.rand(40, generator=torch.Generator().manual_seed(6)) * 2.0 ** torch.arange(
        -30, 10
    )
    matrix = with_factors(40, 400, factor)
    meant = elements(matrix, torch.float32)
    for weight in forms(matrix):
        found = torch.cat([weight.matmul(part) for part in torch.eye(400).split(50)])
        assert torch.equal(found, meant.T)
    ids = torch.tensor([3, 39, 7])
    assert torch.equal(elements(Int4Weight(matrix).cut(ids).matrix, torch.float32), meant[ids])
    exact = elements(replace(matrix, factor=None), torch.float64) / 2**8
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = Int4DeviceWeight.of(matrix, dtype=dtype)
        assert torch.equal(weight.rows(ids).float(), meant[ids].to(dtype).float())
        panels = weight.panels
        assert torch.equal(panels.expanded(dtype).double(), exact)
        assert torch.equal(panels.cut(ids).expanded(dtype).double(), exact[ids])
        assert torch.equal(panels.factors, factor * 2**8)


def test_scales_of_e4m3_are_half_a_bit_a_weight_beside_a_factor_a_row():
    matrix = with_factors(64, 384, torch.ones(64))
    panels = Int4Panels.of(matrix, torch.float32)
    assert panels.width == 16
    native = NativeKernels().pack_int4(matrix, torch.float32)
    for nbytes in (panels.nbytes, native.nbytes, Int4Weight(matrix).nbytes):
        assert nbytes * 8 == 64 * (384 * 4.5 + 32)


def test_memory_is_half_a_byte_a_weight_and_its_scales():
    matrix, _ = made(16, 256, 128)
    weight = ReferenceKernels().pack_int4(matrix, torch.float32)
    assert weight.nbytes == 16 * 128 + 16 * 2 * 5


def test_a_next_operand_made_too_early_is_noticed(tmp_path):
    """Without ``finished``, registers are written that the products before still read."""
    code = """
import triton.language as tl
from sametoken.ops.model.gemm import int4_panels
from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.int4_triton import product
gemm._INTERPRETED = tl.constexpr(True)
words, scales = torch.empty(6144, 512, dtype=torch.int32), torch.empty(128, 6144)
panels = int4_panels.Int4Panels(words, scales, scales.int(), 4096, e2m1=False, fused=True)
product(torch.empty(64, 4096, dtype=torch.bfloat16), panels, "silu_mul")
"""
    with pytest.raises(AssertionError, match="_int4_kernel"):
        compile_launches(code, tmp_path)


def test_the_kernel_compiles_to_tensor_core_products(tmp_path):
    code = """
from dataclasses import replace
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import product
def panels(n, k, width, zeros=False, e2m1=False, minima=False, tops=None):
    blocks = -(-k // 128)
    scales = torch.empty(128 // width * blocks, n)
    words = torch.empty(n, 16 * blocks, dtype=torch.int32)
    offsets = scales if minima else scales.int() if zeros else None
    tops = None if tops is None else words.to(tops)
    return Int4Panels(words, scales, offsets, k, e2m1, tops is None, tops)
def in_pairs(n, k, width, zeros, dtype):
    unpaired = panels(n, k, width, zeros)
    return replace(unpaired, scales=unpaired.scales.int(), paired=dtype)
x = torch.empty(64, 4096, dtype=torch.bfloat16)
product(x[:1], panels(6144, 4096, 128))
product(x, panels(6144, 4096, 32, zeros=True), "silu_mul")
one, few = panels(6144, 2880, 32, e2m1=True), x[:, :2880].contiguous()
product(few, one)
mxfp4 = replace(one, scales=torch.empty(23, 6144, dtype=torch.int32))
product(few, mxfp4)
product(few, replace(mxfp4, scales=mxfp4.scales.view(torch.uint32)))
nvfp4 = replace(one, scales=torch.empty(46, 6144, dtype=torch.int32), factors=torch.empty(6144))
product(few, nvfp4, "silu_mul")
nvfp4.expanded(torch.bfloat16)
product(x, panels(6144, 4096, 32, minima=True))
product(x, panels(6144, 4096, 16, tops=torch.int16))
product(x, in_pairs(6144, 4096, 128, False, torch.bfloat16))
product(x.half(), in_pairs(6144, 4096, 32, True, torch.float16), "silu_mul")
in_pairs(6144, 4096, 64, True, torch.bfloat16).expanded(torch.bfloat16)
panels(6144, 4096, 64, zeros=True).expanded(torch.bfloat16)
panels(6144, 4096, 16, e2m1=True).expanded(torch.bfloat16)
panels(6144, 4096, 32, tops=torch.int32).expanded(torch.bfloat16, torch.zeros(1).long())
"""
    compile_launches(code, tmp_path)
    kernels = [file.read_text() for file in tmp_path.rglob("_int4_kernel.ptx")]
    assert len(kernels) == 10
    assert all("wgmma" in kernel for kernel in kernels)
    # Elements pass from words to the tensor cores within a thread.
    loops = [kernel[: kernel.rindex("wgmma")] for kernel in kernels]
    assert not any("st.shared" in loop or "shfl" in loop for loop in loops)
    # Six make pairs, of which four are of e2m1: two of these round each after its scale.
    in_pairs = [loop for loop in loops if "fma.rn.bf16x2" in loop or "fma.rn.f16x2" in loop]
    assert sorted("cvt.rn." in loop for loop in in_pairs) == [False] * 4 + [True] * 2
    # Numbers of e2m1 pass through subnormal ones.
    assert not any("mul.ftz" in kernel for kernel in kernels)

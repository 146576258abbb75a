"""Products with fp8 weights under the interpreter, and how such weights are made.

Bits are compared on small integers, where every sum is exact; with real numbers
tests/gpu/test_fp8_gpu.py compares them on the chip. The interpreter does not round to
bf16 or e4m3 as a GPU does: fp16 stands in, and a row's scale here is a power of two, so that
e4m3 has every element.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned
from sametoken.ops.model.gemm import fp8, fp8_triton
from sametoken.ops.model.gemm.fp8 import Fp8Weight, quantize
from sametoken.ops.model.gemm.fp8_triton import (
    DEPTH,
    NARROW,
    WIDE,
    Fp8DeviceWeight,
    default_config,
    product,
    rounded,
)
from sametoken.ops.model.gemm.tuning import GemmShape, TritonConfig
from sametoken.ops.weight import RoundedRows, Rounding, RoundingWeight

CONFIGS = [
    TritonConfig(16, 64, DEPTH, num_warps=4, num_stages=2),
    TritonConfig(32, 128, DEPTH, num_warps=4, num_stages=3),
    TritonConfig(64, 64, DEPTH, num_warps=8, num_stages=2, tma=True),
    TritonConfig(16, 64, 2 * DEPTH, num_warps=4, num_stages=3, tma=True),
]
EPILOGUES = ("none", "bias", "silu_mul", "logits")


def integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def activations(rows: int, depth: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small integers times a power of two a row; the largest, 7, has the scale 2**-6."""
    x = integers(rows, depth)
    x[:, depth // 2] = 7
    return (x * 2.0 ** (torch.arange(rows) % 5 - 2)[:, None]).to(dtype)


def weight_of(features: int, depth: int) -> Fp8DeviceWeight:
    """Small integers, scaled by powers of two, inside memory that is NaN elsewhere."""
    scale = 2.0 ** (integers(features, seed=2) - 10)
    matrix = integers(features, depth, seed=1).to(torch.float8_e4m3fn)
    return Fp8DeviceWeight(poisoned(matrix), poisoned(scale))


def exact(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    return x.double() @ (weight.matrix.double() * weight.scale.double()[:, None]).T


def operand_of(epilogue: str, features: int, dtype: torch.dtype) -> torch.Tensor | None:
    return poisoned(integers(features, seed=3).to(dtype)) if epilogue == "bias" else None


def by_reference(x, weight, epilogue: str, operand) -> torch.Tensor:
    plain = Fp8Weight(weight.matrix, weight.scale)
    if epilogue == "silu_mul":
        return plain.gated_matmul(x)
    return plain.matmul(x, operand, torch.float32 if epilogue == "logits" else None)


def same(got: torch.Tensor, expected: torch.Tensor, epilogue: str) -> bool:
    """Bits, except of the exponential of a gated product."""
    if epilogue != "silu_mul":
        return torch.equal(got, expected)
    return torch.allclose(got.float(), expected.float(), rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 16, 32), (5, 37, 72), (33, 50, 200)])
def test_logits_read_nothing_outside_odd_shapes(rows, features, depth, dtype):
    x, weight = poisoned(activations(rows, depth, dtype)), weight_of(features, depth)
    assert torch.equal(weight.matmul(x, out_dtype=torch.float32), exact(x, weight).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 16, 32), (5, 74, 72), (33, 50, 200)])
def test_every_epilogue_is_that_of_the_reference(rows, features, depth, epilogue, dtype):
    x, weight = poisoned(activations(rows, depth, dtype)), weight_of(features, depth)
    operand = operand_of(epilogue, features, dtype)
    got = product(x, weight, epilogue, operand)
    expected = by_reference(x, weight, epilogue, operand)
    assert got.dtype == expected.dtype == (torch.float32 if epilogue == "logits" else dtype)
    assert same(got, expected, epilogue)


@pytest.mark.parametrize(
    ("config", "epilogue", "depth"),
    [
        (config, epilogue, (128, 192, 80)[(i + j) % 3])
        for i, config in enumerate(CONFIGS)
        for j, epilogue in enumerate(EPILOGUES)
    ],
)
def test_tiles_and_load_forms_give_the_result_of_the_reference(config, depth, epilogue):
    x, weight = activations(21, depth), weight_of(48, depth)
    operand = operand_of(epilogue, 48, x.dtype)
    got = product(x, weight, epilogue, operand, config)
    assert same(got, by_reference(x, weight, epilogue, operand), epilogue)


def test_products_choose_their_epilogues():
    x, weight, bias = activations(5, 72), weight_of(48, 72), integers(48, dtype=torch.float16)
    assert torch.equal(weight.matmul(x), product(x, weight))
    assert torch.equal(weight.matmul(x, bias), product(x, weight, "bias", bias))
    assert torch.equal(weight.gated_matmul(x), product(x, weight, "silu_mul"))
    assert torch.equal(weight.matmul(x, out_dtype=torch.float32), product(x, weight, "logits"))
    assert weight.gated_matmul(x).shape == (5, 24)


@pytest.mark.parametrize("kind", [Fp8DeviceWeight, Fp8Weight])
def test_rows_that_others_have_rounded_have_the_products_of_rows(kind):
    """Of all of them, and of some."""
    x, bias, given = activations(5, 72), integers(48).half(), weight_of(48, 72)
    weight, rows = kind(given.matrix, given.scale), RoundedRows(*rounded(x), x.dtype)
    assert isinstance(weight, RoundingWeight)
    assert rows.shape == x.shape
    for some in (slice(0, 5), slice(1, 4), slice(5, 5)):
        own, part = x[some], rows[some]
        assert torch.equal(weight.matmul_rounded(part), weight.matmul(own))
        assert torch.equal(weight.matmul_rounded(part, bias), weight.matmul(own, bias))
        assert torch.equal(weight.gated_matmul_rounded(part), weight.gated_matmul(own))


@pytest.mark.parametrize("rounding", [None, Rounding(grouped=True), Rounding(scale=torch.ones(()))])
def test_rows_rounded_otherwise_than_the_product_rounds_are_refused(rounding):
    rows = RoundedRows(*rounded(activations(3, 128)), torch.float16)
    weight = Fp8DeviceWeight(*quantize(integers(48, 128)), rounding)
    with pytest.raises(AssertionError):
        weight.matmul_rounded(rows)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_row_cannot_tell_how_many_there_are(epilogue):
    x, weight = activations(70, 128), weight_of(48, 128)
    operand = operand_of(epilogue, 48, x.dtype)
    expected = product(x, weight, epilogue, operand)
    for rows in (1, 5, 17, 33, 64):
        assert torch.equal(product(x[:rows], weight, epilogue, operand), expected[:rows])


def test_a_row_beside_rows_of_nan_is_the_same():
    x, weight = activations(20, 128), weight_of(48, 128)
    alone = weight.matmul(x[:1])
    batch = torch.full_like(x, torch.nan)
    batch[:, 0] = 1
    batch[17] = x[0]
    assert torch.equal(weight.matmul(batch)[17], alone[0])


def test_rows_that_do_not_exist_are_not_written():
    x, weight = activations(3, 64), weight_of(20, 64)
    memory = {torch.float32: torch.full((4096,), torch.nan)}
    memory[torch.float16] = memory[torch.float32].half()

    def carved(rows: int, width: int, *, dtype: torch.dtype, device) -> torch.Tensor:
        return memory[dtype][: rows * width].view(rows, width)

    with pytest.MonkeyPatch.context() as patch:
        operands = rounded(x)
        patch.setattr(fp8_triton, "rounded", lambda *_: operands)
        patch.setattr(fp8_triton.torch, "empty", carved)
        results = {dtype: product(x, weight, name) for dtype, name in FORMS.items()}
    for dtype, got in results.items():
        assert torch.equal(got, exact(x, weight).to(dtype))
        assert memory[dtype][60:].isnan().all()


FORMS = {torch.float32: "logits", torch.float16: "none"}


def test_a_depth_or_features_that_would_change_bits_are_refused():
    x, weight = activations(3, 256), weight_of(48, 256)
    grouped = grouped_weight(48, 256, True, "row")
    for refused, config in (
        (grouped, TritonConfig(16, 64, 2 * DEPTH, 4, 2)),
        (grouped, TritonConfig(16, 64, DEPTH // 2, 4, 2)),
        (weight, TritonConfig(16, 32, DEPTH, 4, 2)),
    ):
        with pytest.raises(AssertionError):
            product(x, refused, config=config)


def test_no_rows_give_no_rows():
    assert weight_of(24, 64).matmul(activations(0, 64)).shape == (0, 24)
    assert weight_of(24, 64).gated_matmul(activations(0, 64)).shape == (0, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 33), (5, 576), (2, 4097)])
def test_activations_are_rounded_to_the_bits_of_the_reference(rows, width, dtype):
    x = poisoned(activations(rows, width, dtype))
    matrix, scale = rounded(x)
    expected, scales = fp8.rounded(x)
    assert torch.equal(matrix.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, scales)
    assert torch.equal(matrix.float() * scale[:, None], x.float())


def test_rows_of_zeros_or_of_next_to_nothing_give_zeros():
    x = torch.zeros(3, 72)
    x[1], x[2, 0] = 2.0**-140, -(2.0**-126)
    matrix, scale = rounded(x)
    assert not matrix.float().any()
    assert torch.equal(scale, fp8.rounded(x)[1])
    assert not weight_of(48, 72).matmul(x).any()


@pytest.mark.parametrize("form", [fp8.rounded, rounded])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_are_the_same_for_any_largest_element(form, dtype):
    """Real numbers: only the rounding to e4m3 is beyond the interpreter."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, 300, generator=generator) * 10.0 ** torch.arange(-20, 20)[:, None]).to(
        dtype
    )
    matrix, scale = form(x)
    largest = x.float().abs().amax(dim=1)
    assert torch.equal(scale, largest * torch.tensor(1 / 448, dtype=torch.float32))
    assert torch.equal(matrix.float().abs().amax(dim=1), torch.full((40,), 448.0))


def finite_numbers() -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return numbers[~numbers.float().isnan()]


def test_every_fp8_weight_counts_as_what_it_is():
    numbers = finite_numbers()
    matrix = numbers[:, None].expand(-1, 64).contiguous()
    weight = Fp8DeviceWeight(matrix, torch.ones(len(numbers)))
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 448
    assert torch.equal(weight.matmul(x, out_dtype=torch.float32)[0], 448 * numbers.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [fp8.rounded, rounded])
def test_an_activation_that_is_a_number_of_e4m3_stays_as_it_is(form, dtype):
    """All of them in one row, whose largest is that of e4m3."""
    numbers = finite_numbers()[None]
    matrix, scale = form(poisoned(numbers.to(dtype)))
    assert scale.item() == 1
    assert torch.equal(matrix.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_weights_are_within_half_a_step(dtype):
    generator = torch.Generator().manual_seed(0)
    spread = 10.0 ** torch.arange(-6, 6)[:, None]
    weight = (torch.randn(12, 300, generator=generator) * spread).to(dtype)
    weight[3] = 0
    got = Fp8Weight(*quantize(weight))
    stands_for = got.matrix.float() * got.scale[:, None]
    # Three bits of mantissa; below 2**-6 steps are of one size, 2**-9.
    error = (stands_for - weight.float()).abs()
    limit = weight.float().abs() * 2**-4 + got.scale[:, None] * 2**-10
    assert (error <= limit * (1 + 2**-20)).all()
    assert torch.equal(got.matrix.float().abs().amax(dim=1)[4:], torch.full((8,), 448.0))
    assert not stands_for[3].any()
    assert got.nbytes == 12 * 300 + 12 * 4


def test_a_large_weight_is_quantized_a_slice_at_a_time(monkeypatch):
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(1))
    whole = Fp8Weight(*quantize(weight))
    monkeypatch.setattr(fp8, "_SLICE_ELEMENTS", 200)
    sliced = Fp8Weight(*quantize(weight))
    assert torch.equal(sliced.matrix.view(torch.uint8), whole.matrix.view(torch.uint8))
    assert torch.equal(sliced.scale, whole.scale)


def test_default_kernels_compile_to_products_of_fp8(tmp_path):
    """At shapes of real heads, and one whose depth is no whole number of turns."""
    code = """
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_triton import default_config, product
from sametoken.ops.model.gemm.tuning import GemmShape
LAUNCHES = [(248320, 4096, "logits", (64, 512)), (32000, 4096, "logits", (1, 64))]
LAUNCHES += [(6144, 8192, "none", (32, 64)), (4096, 576, "bias", (1, 512))]
LAUNCHES += [(24576, 4096, "silu_mul", (32, 512))]
for features, depth, epilogue, counts in LAUNCHES:
    matrix = torch.empty(features, depth, dtype=torch.float8_e4m3fn)
    bias = torch.empty(features, dtype=torch.bfloat16) if epilogue == "bias" else None
    for rows in counts:
        x = torch.empty(rows, depth, dtype=torch.bfloat16)
        shape = GemmShape(features, depth, epilogue)
        config = default_config(shape, rows, pdl=rows < 64)
        weight = Fp8Weight(matrix, torch.empty(features))
        product(x, weight, epilogue, bias, config)
"""
    compile_launches(code, tmp_path)
    products = [file.read_text() for file in tmp_path.rglob("_product_kernel.ptx")]
    assert len(products) == 10
    for kernel in products:
        assert re.search(r"wgmma\.mma_async\S+e4m3\.e4m3", kernel)
        assert "mma.sync" not in kernel
        assert "cp.async.cg.shared.global" in kernel
    roundings = [file.read_text() for file in tmp_path.rglob("_round_kernel.ptx")]
    assert len(roundings) == 3
    for kernel in roundings:
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel
        # One exact division a row.
        assert len(re.findall(r"div\.rn\.f32", kernel)) == 1


def test_scales_of_groups_and_plain_activations_compile(tmp_path):
    code = """
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.fp8_triton import product
from sametoken.ops.weight import Rounding
matrix = torch.empty(6144, 4096, dtype=torch.float8_e4m3fn)
one, many = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (1, 512))
for x, epilogue in ((one, "none"), (many, "silu_mul")):
    product(x, Fp8Weight(matrix, torch.empty(6144, 32), Rounding(grouped=True)), epilogue)
product(one, Fp8Weight(matrix, torch.empty(6144), Rounding(scale=torch.empty(()))))
product(many, Fp8Weight(matrix, torch.empty(6144), None))
"""
    compile_launches(code, tmp_path)
    products = [file.read_text() for file in tmp_path.rglob("_product_kernel.ptx")]
    assert sum("e4m3.e4m3" in kernel for kernel in products) == 3
    assert sum("bf16.bf16" in kernel for kernel in products) == 1


SHAPES = [
    GemmShape(features, 4096, epilogue)
    for features, epilogue in ((4096, "none"), (NARROW, "none"), (WIDE, "logits"))
] + [GemmShape(features, 4096, "silu_mul") for features in (1024, 24576, WIDE)]


def test_more_rows_have_larger_tiles():
    for shape in SHAPES[1:]:
        sizes = [default_config(shape, rows, True).block_rows for rows in (16, 32, 64, 4096)]
        assert sizes == [16, 32, 64, 128]


def test_two_programs_share_a_tile_of_a_narrow_weight():
    counts = (16, 32, 33, 64, 65, 128, 129, 300)
    sizes = [default_config(SHAPES[0], rows, True).block_rows for rows in counts]
    assert sizes == [16, 32, 32, 32, 64, 64, 128, 128]


def test_tiles_of_many_rows_keep_a_chip_busy():
    """The largest tiles whose rounds are full: a last round of few programs takes as long."""
    shape, chip = GemmShape(4096, 4096), 132
    for rows in (256, 512, 768, 1024, 2048, 4096):
        config = default_config(shape, rows, True)
        programs = -(-rows // config.block_rows) * (4096 // config.block_features)
        assert programs / (-(-programs // chip) * chip) > 0.9, rows
    long = GemmShape(4096, 12288)
    assert default_config(long, 4096, True).block_features == 256
    assert default_config(long, 4096, True, grouped=True).block_features == 128


def test_tiles_fit_every_chip_with_fp8_products():
    sizes = (1, 16, 17, 32, 33, 64, 65, 128, 192, 2048)
    # What a program may have on compute capability 8.9, and on Hopper.
    memories = (99 << 10, 227 << 10)
    cases = itertools.product(SHAPES, sizes, memories, (1, 2), (False, True))
    for shape, rows, memory, row_bytes, grouped in cases:
        config = default_config(shape, rows, True, memory, row_bytes, grouped)
        assert config.block_features % 64 == 0
        assert config.block_depth == DEPTH or not (grouped or row_bytes > 1)
        read = config.block_features * (2 if shape.epilogue == "silu_mul" else 1)
        assert config.num_stages >= (3 if row_bytes == 1 else 2)
        stage = (row_bytes * config.block_rows + read) * config.block_depth
        assert config.num_stages * stage <= memory


def test_narrow_weights_give_many_programs_that_read_far_ahead():
    narrow, wider = (default_config(GemmShape(n, 4096), 1, True) for n in (NARROW - 1, NARROW))
    assert narrow.block_features == wider.block_features == 64
    assert narrow.num_stages * narrow.block_depth > 2 * wider.num_stages * wider.block_depth


def test_narrow_weights_alone_are_asked_for_early():
    early = [default_config(shape, 1, True).prefetch_bytes for shape in SHAPES]
    assert early == [1024, 0, 0, 0, 0, 0]


ROUNDINGS = {
    "row": Rounding(),
    "groups": Rounding(grouped=True),
    "powers": Rounding(grouped=True, powers=True),
    "fixed": Rounding(scale=torch.tensor(2.0**-4)),
    "none": None,
}


def grouped_weight(features: int, depth: int, by_group: bool, rounding: str) -> Fp8DeviceWeight:
    """As ``weight_of``, with scales by group, in poisoned memory."""
    plain, groups = weight_of(features, depth), -(-depth // DEPTH)
    scale = plain.scale
    if by_group:
        scale = poisoned(2.0 ** (integers(features, groups, seed=4) - 8))
    return Fp8DeviceWeight(plain.matrix, scale, ROUNDINGS[rounding])


def grouped_activations(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """As ``activations``, with the largest element in each group."""
    x = integers(rows, depth)
    x[:, ::DEPTH] = 7
    return (x * 2.0 ** (torch.arange(rows) % 3 - 1)[:, None]).to(dtype)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("at", "rounding"), enumerate(ROUNDINGS))
@pytest.mark.parametrize("by_group", [False, True])
def test_scales_of_groups_give_the_result_of_the_reference(by_group, at, rounding, is_large):
    rows, features, depth = (33, 50, 300) if is_large else (1, 16, 128)
    epilogue = ("bias", "silu_mul")[(at + by_group + is_large) % 2]
    x = poisoned(grouped_activations(rows, depth, torch.float32))
    weight = grouped_weight(features, depth, by_group, rounding)
    operand = operand_of(epilogue, features, x.dtype)
    plain = Fp8Weight(weight.matrix, weight.scale, weight.rounding)
    gated = epilogue == "silu_mul"
    expected = plain.gated_matmul(x) if gated else plain.matmul(x, operand)
    assert same(product(x, weight, epilogue, operand), expected, epilogue)


@pytest.mark.parametrize("rounding", ["row", "groups", "powers", "fixed"])
def test_activations_round_as_the_reference_does(rounding):
    x = poisoned(grouped_activations(7, 300, torch.float16))
    x[3, 5] = 500.0
    values, scale = rounded(x, ROUNDINGS[rounding])
    wanted, wanted_scale = fp8.rounded_by(ROUNDINGS[rounding], x)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(values.float(), wanted.float())

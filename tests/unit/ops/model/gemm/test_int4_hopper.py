"""Products with 4-bit weights on Hopper: what they serve and compute, and how they are compiled.

Their bits are compared in Python here (``gluon_interpreter``), and with those of other kernels on a
chip, in tests/gpu/test_quantized_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from helpers.exact_products import assert_gated, assert_rounded
from helpers.gluon_interpreter import interpreted
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm.int4 import elements, packed_int4
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.weight import Int4Matrix

DTYPES = [torch.bfloat16, torch.float16]


def in_pairs(features: int, depth: int, width: int) -> Int4Panels:
    blocks = -(-depth // 128)
    words = torch.zeros(features, 16 * blocks, dtype=torch.int32)
    scales = torch.zeros(128 // width * blocks, features, dtype=torch.int32)
    paired = torch.bfloat16
    return Int4Panels(words, scales, None, depth, e2m1=False, fused=True, paired=paired)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_pairs_are_served_on_hopper(monkeypatch, on_hopper):
    """Integers in groups of 32 and more, and e2m1 whose scales are at most 2."""
    monkeypatch.setattr(int4_hopper, "is_hopper", lambda device: on_hopper)

    def serves(panels, dtype=torch.bfloat16):
        return int4_hopper.serves(panels, dtype)

    assert serves(in_pairs(70, 544, 32)) is on_hopper
    assert serves(in_pairs(70, 640, 128)) is on_hopper
    assert not serves(in_pairs(70, 512, 32))
    assert not serves(in_pairs(70, 640, 16))
    assert not serves(in_pairs(70, 640, 32), torch.float16)
    assert not serves(replace(in_pairs(70, 640, 32), in_features=636))
    assert not serves(replace(in_pairs(70, 640, 32), paired=None))
    for form in ("mxfp4", "nvfp4"):
        assert serves(of_e2m1(form)[0]) is on_hopper
        assert not serves(of_e2m1(form)[0], torch.float16)
    assert not serves(of_e2m1("mxfp4", most=4.0)[0])


@pytest.fixture
def few(monkeypatch):
    """Two programs with three slots each, so both are used again; no result is there before."""
    monkeypatch.setattr(int4_hopper, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(int4_hopper, "_slots", lambda tile: 3)
    output_of = int4_hopper.output_of
    monkeypatch.setattr(int4_hopper, "output_of", lambda *given: output_of(*given).fill_(torch.nan))


def drawn(dtype, width, features=140, depth=1152, zeros=True, least=0):
    """A matrix as the kernels read it, and its elements.

    Args:
        zeros: whether groups have zeros of their own.
        least: the power of 2 of the smallest scales.
    """
    generator = torch.Generator().manual_seed(width)
    groups = features, depth // width
    codes = torch.randint(0, 16, (features, depth), generator=generator, dtype=torch.uint8)
    # GPTQ has zeros of 16.
    zero = torch.randint(0, 17, groups, generator=generator, dtype=torch.uint8)
    powers = torch.randint(least, 1, groups, generator=generator)
    scale = ((torch.rand(groups, generator=generator) + 0.5) * 2.0**powers / 64).to(dtype)
    zero = zero if zeros else torch.full_like(zero, 8)
    matrix = Int4Matrix(packed_int4(codes, width), scale, zero)
    panels = Int4Panels.of(matrix, dtype)
    assert (panels.paired, panels.offsets is not None) == (dtype, zeros)
    return panels, elements(matrix, dtype)


def of_e2m1(form, features=70, depth=640, most=2.0):
    """A matrix as the kernels read it, and its elements, with factors beside them or None.

    The largest scale of MXFP4 is ``most``.
    """
    generator = torch.Generator().manual_seed(depth)
    width, factor = (
        (32, None) if form == "mxfp4" else (16, torch.rand(features, generator=generator) / 448)
    )
    codes = torch.randint(16, (features, depth), generator=generator, dtype=torch.uint8)
    groups = features, -(-depth // width)
    if factor is None:
        # Of elements below bf16's normal numbers, too.
        scale = torch.randint(129, groups, generator=generator).to(torch.uint8)
        scale[0, 0] = 127 + int(most).bit_length() - 1
        scale = scale.view(torch.float8_e8m0fnu)
    else:
        # Some are subnormal, and zero.
        scale = (torch.rand(groups, generator=generator) ** 8 * 448).to(torch.float8_e4m3fn)
        scale[0, 0] = 448
    matrix = Int4Matrix(packed_int4(codes, width), scale, None, factor=factor)
    found = elements(replace(matrix, factor=None), torch.bfloat16)
    return Int4Panels.of(matrix, torch.bfloat16), found, factor


def rows_of(dtype, rows, depth=1152):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, depth, generator=generator).to(dtype)


def computed(x, panels, epilogue="none", bias=None, seed=0):
    with interpreted(seed):
        return int4_hopper.product(x, panels, epilogue, bias)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, -127), (torch.float16, -18)])
def test_elements_are_rounded_once(dtype, least, width, zeros, few):
    """Subnormal ones too. Rows of a unit matrix give each element alone."""
    panels, expected = drawn(dtype, width, 70, 640, zeros, least)
    smallest = torch.finfo(dtype).smallest_normal
    assert ((expected != 0) & (expected.abs() < smallest)).any()
    assert torch.equal(computed(torch.eye(640, dtype=dtype), panels).T, expected)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_elements_of_e2m1_are_rounded_once(form, few):
    panels, expected, factor = of_e2m1(form)
    if factor is not None:
        expected = (expected.float() * factor[:, None]).bfloat16()
    assert torch.equal(computed(torch.eye(640, dtype=torch.bfloat16), panels).T, expected)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_products_of_e2m1_have_the_same_bits_in_all_tiles(form, few, monkeypatch):
    """Also where a block has not all of its groups, and gated."""
    panels, matrix, factor = of_e2m1(form, 2 * 72, 992)
    x = rows_of(torch.bfloat16, 21, 992) / 64
    plain, gated = computed(x, panels), computed(x, panels, "silu_mul")
    meant = matrix.double() if factor is None else matrix.double() * factor[:, None].double()
    assert_rounded(plain, x.double(), meant)
    assert_gated(gated, plain)
    for seed, tile in enumerate((8, 16, 64)):
        monkeypatch.setattr(int4_hopper, "_ROWS", (tile,))
        assert torch.equal(computed(x, panels, seed=seed), plain), tile
        assert torch.equal(computed(x, panels, "silu_mul", seed=seed), gated), tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "depth"), [(32, 1184), (64, 1152), (128, 640)])
def test_all_tiles_give_the_exact_product_with_the_same_bits(dtype, width, depth, few, monkeypatch):
    """Also where a chunk has one block, and a block not all of its groups."""
    panels, matrix = drawn(dtype, width, depth=depth)
    x, bias = rows_of(dtype, 21, depth), rows_of(dtype, 1, len(matrix))[0]
    first = computed(x, panels, "bias", bias)
    assert_rounded(first, x.double(), matrix.double(), bias)
    for seed, tile in enumerate((8, 16, 64)):
        monkeypatch.setattr(int4_hopper, "_ROWS", (tile,))
        assert torch.equal(computed(x, panels, "bias", bias, seed), first), tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [True, False])
def test_gated_products_are_made_of_plain_ones(dtype, zeros, few, monkeypatch):
    panels, matrix = drawn(dtype, 64, 2 * 72, zeros=zeros)
    x = rows_of(dtype, 21)
    plain, first = computed(x, panels), computed(x, panels, "silu_mul")
    assert_rounded(plain, x.double(), matrix.double())
    assert_gated(first, plain)
    for seed, tile in enumerate((8, 16, 64)):
        monkeypatch.setattr(int4_hopper, "_ROWS", (tile,))
        assert torch.equal(computed(x, panels, "silu_mul", seed=seed), first), tile


@pytest.mark.parametrize(
    ("dtype", "epilogue"), [(torch.bfloat16, "none"), (torch.float16, "silu_mul")]
)
def test_a_row_has_the_same_bits_in_any_batch(dtype, epilogue, few):
    """One row alone, tiles that are full or not, and rows that two tiles have."""
    panels, _ = drawn(dtype, 32, 80, 544)
    x = rows_of(dtype, 70, 544)
    whole = computed(x, panels, epilogue)
    assert not whole.isnan().any()
    for begin, end in ((0, 1), (69, 70), (5, 13), (20, 36), (40, 70), (1, 66)):
        part = computed(x[begin:end].clone(), panels, epilogue, seed=begin)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("depth", [640, 1280])
def test_warp_groups_take_any_turns(depth, few):
    """With as many chunks as groups, and with more."""
    panels, _ = drawn(torch.bfloat16, 128, depth=depth)
    x = rows_of(torch.bfloat16, 13, depth)
    first = computed(x, panels)
    for seed in range(1, 7):
        assert torch.equal(computed(x, panels, seed=seed), first)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("int4")
    code = """
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm.int4_panels import Int4Panels
int4_hopper.pdl_options = lambda x: {"PDL": True, "launch_pdl": True}
def product(rows, features, depth, width, dtype, epilogue, zeros):
    blocks = -(-depth // 128)
    words = torch.empty(features, 16 * blocks, dtype=torch.int32)
    scales = torch.empty(128 // width * blocks, features, dtype=torch.int32)
    panels = Int4Panels(words, scales, scales if zeros else None, depth, False, True, paired=dtype)
    bias = torch.empty(features, dtype=dtype) if epilogue == "bias" else None
    int4_hopper.product(torch.empty(rows, depth, dtype=dtype), panels, epilogue, bias)
product(1, 4096, 12288, 128, torch.bfloat16, "none", False)
product(8, 6144, 4096, 128, torch.bfloat16, "none", False)
product(30, 24576, 4096, 64, torch.float16, "silu_mul", True)
product(100, 1000, 2880, 32, torch.bfloat16, "bias", True)
words, scales = (torch.empty(24576, n, dtype=torch.int32) for n in (512, 64))
nvfp4 = Int4Panels(words, scales.T, None, 4096, True, False, factors=torch.empty(24576))
int4_hopper.product(torch.empty(64, 4096, dtype=torch.bfloat16), nvfp4, "silu_mul")
"""
    compile_launches(code, cache)
    return cache


def test_elements_stay_in_the_threads_that_multiply_them(compiled):
    kernels = [file.read_text() for file in compiled.rglob("turns_kernel.ptx")]
    # One row and eight are one kernel.
    assert len(kernels) == 4
    for kernel in kernels:
        assert "wgmma" in kernel
        assert "fma.rn.bf16x2" in kernel or "fma.rn.f16x2" in kernel
        assert "cvt.rn.bf16x2" not in kernel[: kernel.rindex("wgmma")]
        assert "shfl" not in kernel[kernel.index("wgmma") : kernel.rindex("wgmma")]


def test_words_are_loaded_early_and_activations_after_the_wait(compiled):
    """What is stored needs activations, so it too comes after the kernels before."""
    for file in compiled.rglob("turns_kernel.ptx"):
        before, after = file.read_text().split("griddepcontrol.wait")
        loads = "cp.async.bulk.tensor"
        assert after.partition("barrier.sync")[0].count(loads) == 4
        assert (before + after.partition("barrier.sync")[2]).count(loads) == 2


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled)

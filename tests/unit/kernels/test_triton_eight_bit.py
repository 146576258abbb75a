"""Logits with eight-bit weights under the interpreter, and how such weights are made.

Bits are compared on small integers, where every sum is exact; with real numbers
tests/gpu/test_eight_bit_gpu.py compares them on the chip. The interpreter does not round to
bf16 or e4m3 as a GPU does: fp16 stands in, and what is rounded here is an e4m3 already.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.kernels.gemm import eight_bit, eight_bit_triton
from sametoken.kernels.gemm.eight_bit import EightBitWeight, quantize
from sametoken.kernels.gemm.eight_bit_triton import DEPTH, WIDE, default_config, logits, rounded
from sametoken.kernels.gemm.tuning import TritonConfig

CONFIGS = [
    TritonConfig(16, 64, DEPTH, num_warps=4, num_stages=2),
    TritonConfig(32, 128, DEPTH, num_warps=4, num_stages=3),
    TritonConfig(64, 64, DEPTH, num_warps=8, num_stages=2, tma=True),
    TritonConfig(16, 64, DEPTH, num_warps=4, num_stages=3, tma=True, tma_rows=False),
]


def integers(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def weight_of(features: int, depth: int) -> EightBitWeight:
    """Small integers, scaled by powers of two, inside memory that is NaN elsewhere."""
    scale = 2.0 ** integers(features, dtype=torch.float32, seed=2)
    matrix = integers(features, depth, dtype=torch.float32, seed=1).to(torch.float8_e4m3fn)
    return EightBitWeight(poisoned_view(matrix), poisoned_view(scale))


def poisoned_view(x: torch.Tensor) -> torch.Tensor:
    """The same tensor inside memory whose every other element is NaN."""
    memory = torch.full((x.numel() + 512,), torch.nan).to(x.dtype)
    memory[256 : 256 + x.numel()] = x.flatten()
    return memory[256 : 256 + x.numel()].view(x.shape)


def exact(x: torch.Tensor, weight: EightBitWeight) -> torch.Tensor:
    return x.double() @ (weight.matrix.double() * weight.scale.double()[:, None]).T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 16, 32), (5, 37, 72), (33, 50, 200)])
def test_logits_read_nothing_outside_odd_shapes(rows, features, depth, dtype):
    x, weight = poisoned_view(integers(rows, depth, dtype=dtype)), weight_of(features, depth)
    assert torch.equal(logits(x, weight), exact(x, weight).float())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("depth", [128, 192, 80])
def test_tiles_and_load_forms_give_the_result_of_the_reference(config, depth):
    x, weight = integers(21, depth) / 16, weight_of(48, depth)
    got = logits(x, weight, config)
    assert got.dtype == torch.float32
    assert torch.equal(got, eight_bit.logits(x, weight))
    assert torch.equal(got, exact(x, weight).float())


def test_a_row_cannot_tell_how_many_there_are():
    x, weight = integers(70, 128) / 16, weight_of(48, 128)
    expected = logits(x, weight)
    for rows in (1, 5, 17, 33, 64):
        assert torch.equal(logits(x[:rows], weight), expected[:rows])


def test_a_row_beside_rows_of_nan_is_the_same():
    x, weight = integers(20, 128), weight_of(48, 128)
    alone = logits(x[:1], weight)
    company = torch.full_like(x, torch.nan)
    company[17] = x[0]
    assert torch.equal(logits(company, weight)[17], alone[0])


def test_rows_that_do_not_exist_are_not_written(monkeypatch):
    x, weight = integers(3, 64), weight_of(20, 64)
    memory = torch.full((64, 20), torch.nan)
    monkeypatch.setattr(eight_bit_triton.torch, "empty", lambda *shape, **_: memory[: shape[0]])
    assert torch.equal(logits(x, weight), exact(x, weight).float())
    assert memory[3:].isnan().all()


def test_a_depth_or_features_that_would_change_bits_are_refused():
    x, weight = integers(3, 128), weight_of(48, 128)
    for config in (TritonConfig(16, 64, 64, 4, 2), TritonConfig(16, 32, DEPTH, 4, 2)):
        with pytest.raises(AssertionError):
            logits(x, weight, config)


@pytest.mark.parametrize("form", [eight_bit.logits, logits])
def test_activations_beyond_e4m3_count_as_its_largest(form):
    x = torch.tensor([[460.0, -1e30, torch.inf] + [0.0] * 61]).bfloat16()
    weight = EightBitWeight(torch.eye(16, 64).to(torch.float8_e4m3fn), torch.ones(16))
    assert form(x, weight)[0, :4].tolist() == [448.0, -448.0, 448.0, 0.0]


def test_no_rows_give_no_rows():
    assert logits(integers(0, 64), weight_of(24, 64)).shape == (0, 24)


def finite_numbers() -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return numbers[~numbers.float().isnan()]


def test_every_eight_bit_weight_counts_as_what_it_is():
    numbers = finite_numbers()
    weight = EightBitWeight(numbers[:, None].expand(-1, 64).contiguous(), torch.ones(len(numbers)))
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 1
    assert torch.equal(logits(x, weight)[0], numbers.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [eight_bit.rounded, rounded])
def test_an_activation_that_is_an_eight_bit_number_stays_as_it_is(form, dtype):
    numbers = finite_numbers()
    got = form(poisoned_view(numbers.to(dtype)))
    assert torch.equal(got.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_weights_are_within_half_a_step(dtype):
    generator = torch.Generator().manual_seed(0)
    spread = 10.0 ** torch.arange(-6, 6)[:, None]
    weight = (torch.randn(12, 300, generator=generator) * spread).to(dtype)
    weight[3] = 0
    got = quantize(weight)
    stands_for = got.matrix.float() * got.scale[:, None]
    # Three bits of mantissa; below 2**-6 steps are of one size, 2**-9.
    error = (stands_for - weight.float()).abs()
    assert (error <= weight.float().abs() * 2**-4 + got.scale[:, None] * 2**-10).all()
    assert torch.equal(got.matrix.float().abs().amax(dim=1)[4:], torch.full((8,), 448.0))
    assert not stands_for[3].any()
    assert got.nbytes == 12 * 300 + 12 * 4


def test_a_large_weight_is_quantized_a_slice_at_a_time(monkeypatch):
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(1))
    whole = quantize(weight)
    monkeypatch.setattr(eight_bit, "_SLICE_ELEMENTS", 200)
    sliced = quantize(weight)
    assert torch.equal(sliced.matrix.view(torch.uint8), whole.matrix.view(torch.uint8))
    assert torch.equal(sliced.scale, whole.scale)


def test_default_kernels_compile_to_products_of_eight_bits(tmp_path):
    """At shapes of real heads, wide and narrow, and one whose depth is no whole number of turns."""
    code = """
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.gemm.eight_bit_triton import default_config, logits
for features, depth in [(248320, 4096), (32000, 4096), (8192, 576)]:
    matrix = torch.empty(features, depth, dtype=torch.float8_e4m3fn)
    for rows in (1, 32, 64, 512):
        x = torch.empty(rows, depth, dtype=torch.bfloat16)
        config = default_config(features, rows, overlap=rows < 64)
        logits(x, EightBitWeight(matrix, torch.empty(features)), config)
"""
    compile_launches(code, tmp_path)
    products = [file.read_text() for file in tmp_path.rglob("_product_kernel.ptx")]
    assert len(products) >= 4
    for product in products:
        assert re.search(r"wgmma\.mma_async\S+e4m3\.e4m3", product)
        assert "mma.sync" not in product
        assert "cp.async.cg.shared.global" in product
    roundings = [file.read_text() for file in tmp_path.rglob("_round_kernel.ptx")]
    assert roundings
    assert all("cvt.rn.satfinite.e4m3x2.f32" in rounding for rounding in roundings)


def test_more_rows_have_larger_tiles_that_fit_every_chip_with_eight_bit_products():
    assert [default_config(32000, rows, True).block_rows for rows in (16, 32, 64, 300)] == [
        *(16, 32, 64, 128)
    ]
    for features, rows in itertools.product((8192, WIDE), (1, 16, 17, 32, 33, 64, 65, 2048)):
        config = default_config(features, rows, True)
        stage = (config.block_rows + config.block_features) * DEPTH
        # What a program may have on compute capability 8.9.
        assert config.num_stages * stage <= 99 << 10


def test_narrow_weights_alone_are_asked_for_early():
    assert default_config(WIDE - 1, 1, True).prefetch_bytes > 0
    assert default_config(WIDE, 1, True).prefetch_bytes == 0

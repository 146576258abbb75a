"""Logits with eight-bit weights under the interpreter, and how such weights are made.

Bits are compared on small integers, where every sum is exact; with real numbers
tests/gpu/test_eight_bit_gpu.py compares them on the chip. The interpreter does not round to
bf16 as a GPU does: fp16 stands in.
"""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.kernels.gemm import eight_bit, eight_bit_triton
from sametoken.kernels.gemm.eight_bit import EightBitWeight, quantize
from sametoken.kernels.gemm.eight_bit_triton import Tiles, default_tiles, logits

TILES = [
    Tiles(16, 64, 64, num_warps=4, num_stages=2),
    Tiles(32, 32, 128, num_warps=4, num_stages=3),
    Tiles(64, 128, 64, num_warps=8, num_stages=2),
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


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("depth", [128, 192, 80])
def test_tiles_give_the_result_of_the_reference(tiles, depth):
    x, weight = integers(21, depth) / 16, weight_of(48, depth)
    got = logits(x, weight, tiles)
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


@pytest.mark.parametrize("form", [eight_bit.logits, logits])
def test_activations_beyond_fp16_count_as_its_largest(form):
    x = torch.tensor([[1e6, -1e30] + [0.0] * 62]).bfloat16()
    weight = EightBitWeight(torch.eye(16, 64).to(torch.float8_e4m3fn), torch.ones(16))
    assert form(x, weight)[0, :3].tolist() == [65504.0, -65504.0, 0.0]


def test_no_rows_give_no_rows():
    assert logits(integers(0, 64), weight_of(24, 64)).shape == (0, 24)


def test_every_eight_bit_number_is_converted_exactly():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = numbers[~numbers.float().isnan()]
    weight = EightBitWeight(finite[:, None].expand(-1, 64).contiguous(), torch.ones(len(finite)))
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 1
    assert torch.equal(logits(x, weight)[0], finite.float())


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


def test_default_tiles_compile(tmp_path):
    """At shapes of real heads, wide and narrow, and one whose depth is no whole number of tiles."""
    code = """
from sametoken.kernels.gemm.eight_bit import EightBitWeight
from sametoken.kernels.gemm.eight_bit_triton import logits
for features, depth in [(248320, 4096), (32000, 4096), (8192, 576)]:
    matrix = torch.empty(features, depth, dtype=torch.float8_e4m3fn)
    for rows in (1, 32, 512):
        x = torch.empty(rows, depth, dtype=torch.bfloat16)
        logits(x, EightBitWeight(matrix, torch.empty(features)))
"""
    compile_launches(code, tmp_path)


def test_tiles_hold_whole_groups_of_columns():
    for features in (8192, eight_bit_triton.WIDE):
        for rows in (1, 16, 17, 32, 33, 64, 65, 2048):
            assert default_tiles(features, rows).block_depth % eight_bit_triton.GROUP == 0


def test_more_rows_have_larger_tiles_and_wide_weights_shallower_pipelines():
    tiles = [default_tiles(32000, rows) for rows in (16, 32, 64, 300)]
    assert [one.block_rows for one in tiles] == [16, 32, 64, 64]
    for rows in (16, 32):
        assert default_tiles(248320, rows).num_stages < default_tiles(32000, rows).num_stages

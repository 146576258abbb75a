"""The start-up check of experts: every form passes, and rows that know of others are refused."""

from __future__ import annotations

import pytest
import torch

from sametoken.errors import UnsupportedError
from sametoken.ops.model import moe_triton
from sametoken.ops.model.gemm import fp8
from sametoken.ops.model.gemm.int4 import packed_int4
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.model.moe_tiles import ExpertTile
from sametoken.ops.triton import TritonKernels
from sametoken.ops.weight import BY_ROW, ClampedExperts, Fp8Matrix, Int4Matrix, Rounding

CPU, DTYPE = torch.device("cpu"), torch.float32
NUM_EXPERTS, HIDDEN, INNER = 3, 128, 32
COUNTS = (5, 40)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 8


def plain(kernels, features, depth):
    return kernels.pack(floats(features, depth, seed=features))


def float8_by_row(kernels, features, depth):
    values = floats(features, depth).to(torch.float8_e4m3fn)
    return kernels.pack_fp8(Fp8Matrix(values, torch.rand(features) + 0.5, BY_ROW), DTYPE)


def float8_by_group(kernels, features, depth):
    values, groups = floats(features, depth).to(torch.float8_e4m3fn), -(-depth // 128)
    scale = torch.rand(features, groups) + 0.5
    return kernels.pack_fp8(Fp8Matrix(values, scale, Rounding(grouped=True)), DTYPE)


def four_bits(kernels, features, depth, *, e2m1=False):
    generator = torch.Generator().manual_seed(features)
    values = torch.randint(0, 16, (features, depth), generator=generator, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-7, -4, (features, depth // 32), generator=generator)
    zero = None if e2m1 else torch.full_like(scale, 7, dtype=torch.uint8)
    scale = scale.to(torch.float8_e8m0fnu) if e2m1 else scale
    return kernels.pack_int4(Int4Matrix(packed_int4(values, 32), scale, zero), DTYPE)


def mxfp4(kernels, features, depth):
    return four_bits(kernels, features, depth, e2m1=True)


FORMS = [plain, float8_by_row, float8_by_group, four_bits, mxfp4]


@pytest.fixture
def packed(monkeypatch):
    """Kernels that have packed experts of a form twice."""
    # The interpreter's products of floats depend on the tile.
    tile = ExpertTile(16, 32, 128, 4, 4)
    for choose in ("expert_tile", "panels_tile"):
        monkeypatch.setattr(moe_triton, choose, lambda *_: tile)
    # The interpreter does not round to float8 as a GPU does.
    monkeypatch.setattr(moe_triton, "rounded", lambda x, how: fp8.rounded_by(how, x))

    def pack(weight):
        kernels = TritonKernels(GemmTable())
        sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        gate_up, down = ([weight(kernels, *size) for _ in range(NUM_EXPERTS)] for size in sizes)
        biases = (floats(NUM_EXPERTS, size) for size, _ in sizes)
        form = ClampedExperts(1.702, 7.0, *biases) if weight is mxfp4 else None
        return kernels, [kernels.pack_experts(gate_up, down, form) for _ in range(2)]

    return pack


def spoil(monkeypatch, is_spoilt):
    """Let products of some pairs have another last bit."""
    product = moe_triton._product

    def spoilt(x, stack, biases, groups, out, gather, *rest):
        product(x, stack, biases, groups, out, gather, *rest)
        parts = zip(*(one.tolist() for one in (groups.experts, groups.counts)), strict=True)
        for expert, count in parts:
            # Only those of down lie in the order of pairs.
            if not gather and is_spoilt(groups.members.shape[1], count):
                out[groups.members[expert, :count].long()] *= 1 + 2**-22

    monkeypatch.setattr(moe_triton, "_product", spoilt)


@pytest.mark.parametrize("weight", FORMS)
def test_experts_of_every_form_are_compared_once(packed, weight):
    kernels, kept = packed(weight)
    assert kernels.prove_quantized(COUNTS, DTYPE, CPU) == 1
    assert len(kept) == 2


@pytest.mark.parametrize("weight", FORMS)
def test_bits_that_depend_on_the_number_of_rows_are_refused(packed, weight, monkeypatch):
    kernels, kept = packed(weight)
    spoil(monkeypatch, lambda pairs, count: pairs > 40)
    with pytest.raises(UnsupportedError, match=r"experts of \[64, 128\] .* \[40\] rows") as caught:
        kernels.prove_quantized(COUNTS, DTYPE, CPU)
    assert "report the GPU" in caught.value.remedy
    assert kept


def test_bits_that_depend_on_what_others_choose_are_refused(packed, monkeypatch):
    kernels, kept = packed(plain)
    spoil(monkeypatch, lambda pairs, count: count % 2)
    with pytest.raises(UnsupportedError, match="give a row other bits"):
        kernels.prove_quantized(COUNTS, DTYPE, CPU)
    assert kept

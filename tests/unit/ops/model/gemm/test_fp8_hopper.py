"""Float8 products of few rows on Hopper: what they serve, and what the compiler makes of them.

Their bits are compared on a chip, in tests/gpu/test_quantized_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from sametoken.ops.model.gemm import fp8_hopper
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.weight import Rounding


def weight(depth: int, rounding: Rounding | None, groups: int | None = None) -> Fp8Weight:
    matrix = torch.zeros(70, depth, dtype=torch.float8_e4m3fn)
    return Fp8Weight(matrix, torch.ones(70) if groups is None else torch.ones(70, groups), rounding)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_few_rows_with_a_scale_each_are_served_on_hopper(monkeypatch, on_hopper):
    monkeypatch.setattr(fp8_hopper, "is_hopper", lambda device: on_hopper)
    x = torch.zeros(8, 384)
    assert fp8_hopper.serves(x, weight(384, Rounding())) is on_hopper
    assert not fp8_hopper.serves(torch.zeros(9, 384), weight(384, Rounding()))
    assert not fp8_hopper.serves(x, weight(384, None))
    assert not fp8_hopper.serves(x, weight(384, Rounding(grouped=True), 3))
    assert not fp8_hopper.serves(x, weight(384, Rounding(), 3))
    assert not fp8_hopper.serves(x[:, :376], weight(376, Rounding()))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("fp8")
    code = """
from sametoken.ops.model.gemm import fp8_hopper
from sametoken.ops.model.gemm.fp8 import Fp8Weight
fp8_hopper.pdl_options = lambda x: {"PDL": True, "launch_pdl": True}
def product(rows, features, depth, epilogue, dtype):
    e4m3 = torch.float8_e4m3fn
    weight = Fp8Weight(torch.empty(features, depth, dtype=e4m3), torch.empty(features))
    bias = torch.empty(features, dtype=dtype) if epilogue == "bias" else None
    x, scales = torch.empty(rows, depth, dtype=e4m3), torch.empty(rows)
    fp8_hopper.product(x, scales, weight, epilogue, bias, dtype)
product(1, 4096, 12288, "none", torch.bfloat16)
product(8, 6144, 4096, "none", torch.bfloat16)
product(3, 24576, 4096, "silu_mul", torch.float16)
product(8, 1000, 2896, "bias", torch.bfloat16)
"""
    compile_launches(code, cache)
    return cache


def test_weights_are_loaded_early_and_activations_after_the_wait(compiled):
    """What is stored needs activations, so it too comes after the kernels before."""
    kernels = [file.read_text() for file in compiled.rglob("few_rows_kernel.ptx")]
    # One row and eight are one kernel.
    assert len(kernels) == 3
    for kernel in kernels:
        before, after = kernel.split("griddepcontrol.wait")
        loads = "cp.async.bulk.tensor"
        assert after.partition("barrier.sync")[0].count(loads) == 2
        assert (before + after.partition("barrier.sync")[2]).count(loads) == 4
        assert "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3" in kernel


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled)

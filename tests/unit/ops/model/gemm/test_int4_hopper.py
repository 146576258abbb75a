"""Products with 4-bit weights on Hopper: what they serve, and what the compiler makes of them.

Their bits are compared on a chip, in tests/gpu/test_quantized_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from sametoken.ops.model.gemm import int4_hopper
from sametoken.ops.model.gemm.int4_panels import Int4Panels


def in_pairs(features: int, depth: int, width: int) -> Int4Panels:
    blocks = -(-depth // 128)
    words = torch.zeros(features, 16 * blocks, dtype=torch.int32)
    scales = torch.zeros(128 // width * blocks, features, dtype=torch.int32)
    paired = torch.bfloat16
    return Int4Panels(words, scales, None, depth, e2m1=False, fused=True, paired=paired)


@pytest.mark.parametrize("on_hopper", [True, False])
def test_pairs_in_groups_of_32_and_more_are_served_on_hopper(monkeypatch, on_hopper):
    monkeypatch.setattr(int4_hopper, "is_hopper", lambda device: on_hopper)
    assert int4_hopper.serves(in_pairs(70, 288, 32)) is on_hopper
    assert int4_hopper.serves(in_pairs(70, 384, 128)) is on_hopper
    assert not int4_hopper.serves(in_pairs(70, 384, 16))
    assert not int4_hopper.serves(replace(in_pairs(70, 384, 32), in_features=380))
    assert not int4_hopper.serves(replace(in_pairs(70, 384, 32), paired=None))


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
"""
    compile_launches(code, cache)
    return cache


def test_elements_stay_in_the_threads_that_multiply_them(compiled):
    kernels = [file.read_text() for file in compiled.rglob("turns_kernel.ptx")]
    # One row and eight are one kernel.
    assert len(kernels) == 3
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

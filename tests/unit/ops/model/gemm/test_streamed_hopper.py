"""Products of few rows on Hopper: which they are, and what the compiler makes of them.

Their bits are compared on a chip, in tests/gpu/test_gemm_gpu.py and test_quantized_gpu.py.
"""

from __future__ import annotations

import re

import pytest

from helpers.compiled import compile_launches, unused_barriers
from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.model.gemm.tuning import GemmShape, StreamedConfig, streamed_config

GATED = GemmShape(24576, 4096, "silu_mul")


def test_few_rows_are_served_where_lines_of_weights_can_be_loaded():
    for shape in (GemmShape(4096, 4096), GATED, GemmShape(151936, 4096, "logits")):
        for rows in (1, 8, 9, 32):
            assert streamed_config(shape, rows, 1)
            assert streamed_config(shape, rows, 2)
        assert streamed_config(shape, 64, 2)
        assert streamed_config(shape, 64, 1) is None
        assert streamed_config(shape, 129, 2) is None
    assert streamed_config(GemmShape(4096, 4100), 1, 2) is None
    assert streamed_config(GemmShape(4096, 4104), 1, 1) is None
    assert streamed_config(GemmShape(2 * 4100, 4096, "silu_mul"), 1, 2) is None


def test_more_rows_of_narrow_weights_alone_are_served():
    assert streamed_config(GemmShape(4096, 12288), 65, 2) == StreamedConfig(64, 64, boxes=1)
    assert streamed_config(GemmShape(6144, 4096), 65, 2) is None
    assert streamed_config(GATED, 65, 2) is None


@pytest.mark.parametrize(
    ("features", "depth", "width"), [(4096, 4096, 32), (6144, 4096, 48), (6144, 2048, 64)]
)
def test_long_rows_are_shared_out_evenly(features, depth, width):
    """Where rows are short, tiles begin and end too often for narrow ones."""
    config = streamed_config(GemmShape(features, depth), 8, 2)
    assert config.block_features == width
    if width < 64:
        assert 0.9 < -(-features // width) / MULTIPROCESSORS <= 1


def test_groups_share_activations_where_they_are_many_and_no_program_waits_for_it():
    assert [streamed_config(GATED, rows, 2).warp_groups for rows in (8, 16, 64)] == [1, 3, 3]
    assert streamed_config(GemmShape(28672, 4096, "silu_mul"), 16, 2).warp_groups == 2
    assert streamed_config(GATED, 16, 1).warp_groups == 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("streamed")
    code = """
from sametoken.ops.model.gemm import streamed_hopper
from sametoken.ops.model.gemm.triton import Scaling
from sametoken.ops.model.gemm.tuning import GemmShape, StreamedConfig, streamed_config
streamed_hopper.pdl_options = lambda x: {"PDL": True, "launch_pdl": True}
e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
def product(rows, features, depth, epilogue="none", dtype=bf16, config=None):
    given = torch.float16 if dtype == e4m3 else dtype
    scaling = None
    if dtype == e4m3:
        scaling = Scaling(torch.empty(features), torch.empty(rows), given)
    bias = torch.empty(features, dtype=given) if epilogue == "bias" else None
    x, matrix = (torch.empty(n, depth, dtype=dtype) for n in (rows, features))
    config = config or streamed_config(GemmShape(features, depth, epilogue), rows, x.itemsize)
    streamed_hopper.product(config, x, matrix, epilogue, bias, scaling)
product(1, 4096, 12288)
product(8, 4096, 12288)
product(3, 24576, 4096, "silu_mul")
product(8, 6144, 4096, dtype=e4m3)
product(8, 24576, 4096, "silu_mul", dtype=e4m3)
product(64, 6144, 4096, "bias", dtype=torch.float16)
product(100, 1000, 2896)
product(64, 151936, 4096, "logits")
product(16, 28672, 4096, "silu_mul")
product(64, 24576, 4096, "silu_mul")
product(128, 24576, 4096, "silu_mul", config=StreamedConfig(128, 32, 1, 3, "never"))
"""
    compile_launches(code, cache)
    return [(file.read_text(), file) for file in cache.rglob("streamed_kernel.ptx")], cache


def test_weights_are_loaded_early_and_activations_after_the_wait(compiled):
    """What is stored needs activations, so it too comes after the kernels before."""
    kernels, _ = compiled
    # One row and eight are one kernel.
    assert len(kernels) == 10
    for kernel, _ in kernels:
        before, after = kernel.split("griddepcontrol.wait")
        own, _, others = after.partition("barrier.sync")
        loads = "cp.async.bulk.tensor"
        assert own.count(loads) in (1, 2, 4)
        assert "tensor.4d" not in own
        weights = (before + others).count(loads)
        assert weights
        assert weights % own.count(loads) == 0


def test_float8_is_multiplied_as_such(compiled):
    kernels, _ = compiled
    assert sum("k32.f32.e4m3.e4m3" in kernel for kernel, _ in kernels) == 2
    assert sum("k16.f32.f16.f16" in kernel for kernel, _ in kernels) == 1


def test_the_next_kernel_starts_at_once_or_not_before_the_end(compiled):
    kernels, _ = compiled
    late = [kernel for kernel, _ in kernels if "launch_dependents" not in kernel]
    assert [re.findall(r"m64n(\d+)k", kernel)[0] for kernel in late] == ["128"]


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled[1])

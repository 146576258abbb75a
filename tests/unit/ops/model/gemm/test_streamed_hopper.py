"""Products of few rows on Hopper: which they are, and what the compiler makes of them.

Their bits are compared on a chip, in tests/gpu/test_gemm_gpu.py and test_quantized_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.hopper_layouts import VIEWS_REACH_FURTHER
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.gemm import fp8_triton, streamed_hopper
from sametoken.ops.model.gemm import product as gemm
from sametoken.ops.model.gemm import triton as tiled
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.triton import Scaling
from sametoken.ops.model.gemm.tuning import (
    ROW_BUCKETS,
    GemmShape,
    GemmTable,
    streamed_config,
)
from sametoken.ops.triton import DeviceWeight
from sametoken.ops.weight import BY_ROW, Rounding

GATED = GemmShape(24576, 4096, "silu_mul")
#: Shapes of models, and of ranks' shares of them: a gate of one feature, routers, odd shares of a
#: vocabulary, hidden sizes and halves that fill no tile, more than 2^31 elements. With each the
#: most rows that are streamed in 16 bits, and in float8.
USED = [
    (GemmShape(1, 2048), 128, 32),
    (GemmShape(8, 4096, "logits"), 128, 32),
    (GemmShape(256, 7168, "logits"), 128, 32),
    (GemmShape(576, 576, "bias"), 128, 32),
    (GemmShape(2688, 3712 // 2), 128, 32),
    (GemmShape(32003, 576, "logits"), 64, 32),
    (GemmShape(151936 // 8, 4096, "logits"), 64, 32),
    (GemmShape(2 * 1352, 2688, "silu_mul"), 64, 32),
    (GemmShape(2 * 2880 // 8, 2880, "silu_mul"), 64, 32),
    (GemmShape(5120, 1288), 64, 0),
    (GemmShape(5120, 2880 // 8), 64, 0),
    (GemmShape(5120, 2880 // 64), 0, 0),
    (GemmShape(2 * 1348, 2688, "silu_mul"), 0, 0),
    (GemmShape(262144, 8448, "logits"), 64, 32),
]


@pytest.fixture
def launched(monkeypatch):
    """Launches that do not happen: the grid, the arguments and the options of each."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append((grid, arguments, options))

    monkeypatch.setattr(streamed_hopper, "streamed_kernel", Kernel())
    return launches


def launch(config, shape, rows, dtype):
    x, matrix = (
        torch.empty(count, shape.in_features, dtype=dtype, device="meta")
        for count in (rows, shape.out_features)
    )
    scaling = None
    if dtype == torch.float8_e4m3fn:
        scaling = Scaling(x.new_empty(shape.out_features), x.new_empty(rows), torch.bfloat16)
    return streamed_hopper.product(config, x, matrix, shape.epilogue, None, scaling)


@pytest.mark.parametrize(("shape", "rows_of_16_bits", "rows_of_float8"), USED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_shapes_in_use_are_launched_whole(shape, rows_of_16_bits, rows_of_float8, dtype, launched):
    """Descriptors refuse addresses and rows that are no multiples of 16 bytes."""
    most = rows_of_float8 if dtype.itemsize == 1 else rows_of_16_bits
    for rows in (1, 8, 9, 32, 33, 64, 65, 128, 129):
        config = streamed_config(shape, rows, dtype.itemsize)
        assert (config is not None) == (rows <= most)
        if config is None:
            continue
        out = launch(config, shape, rows, dtype)
        (grid,), (x, weight, *_), options = launched.pop()
        assert 1 <= grid <= MULTIPROCESSORS
        assert x.block_shape == [config.block_rows, 128 // dtype.itemsize]
        assert weight.block_shape[-1] == 128 // dtype.itemsize
        assert options["SLOTS"] >= 2
        features = cdiv(out.shape[1], config.warp_groups * config.block_features)
        assert grid == min(features * cdiv(rows, config.block_rows), MULTIPROCESSORS)


@pytest.mark.parametrize("element_bytes", [1, 2])
def test_all_rows_of_a_bucket_have_one_kernel(element_bytes):
    """The start-up check runs one row count of a bucket, and takes its choice for all of them."""
    buckets = zip((0, *ROW_BUCKETS), ROW_BUCKETS, strict=False)
    for below, bucket in buckets:
        for shape, *_ in USED:
            rows = range(below + 1, bucket + 1)
            assert len({streamed_config(shape, count, element_bytes) for count in rows}) == 1


def test_tiles_of_many_rows_fit(launched):
    """Gated ones; others have the tiles of fewer rows."""
    for rows in (65, 128):
        launch(streamed_config(GATED, rows, 2), GATED, rows, torch.bfloat16)
        assert launched.pop()[2]["SLOTS"] >= 2


@pytest.fixture
def served(monkeypatch):
    """The kernels that products reach, which run none."""
    reached = []
    for module, name in (
        (streamed_hopper, "product"),
        (tiled, "tiled_product"),
        (gemm, "_cublas_product"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: reached.append(name))
    return reached


@pytest.mark.parametrize(
    ("features", "depth", "gated", "dtype", "kernel"),
    [
        (1, 64, False, torch.bfloat16, "product"),
        (16, 72, True, torch.float16, "product"),
        (24, 64, True, torch.float16, "tiled_product"),
        (24, 68, False, torch.bfloat16, "tiled_product"),
        (24, 64, False, torch.float32, "tiled_product"),
    ],
)
def test_a_weight_that_cannot_be_streamed_has_another_kernel(
    features, depth, gated, dtype, kernel, served
):
    weight = DeviceWeight(torch.zeros(features, depth, dtype=dtype), GemmTable(hopper=True))
    x = torch.zeros(3, depth, dtype=dtype)
    (weight.gated_matmul if gated else weight.matmul)(x)
    assert served == [kernel]


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize(
    ("depth", "rows", "rounding", "groups", "kernel"),
    [
        (272, 32, BY_ROW, (), "product"),
        (272, 33, BY_ROW, (), "tiled_product"),
        (264, 32, BY_ROW, (), "tiled_product"),
        (272, 32, None, (), "tiled_product"),
        (272, 32, BY_ROW, (3,), "tiled_product"),
        (272, 32, Rounding(grouped=True), (), "tiled_product"),
    ],
)
def test_float8_is_streamed_with_a_scale_a_row_and_a_feature(
    depth, rows, rounding, groups, kernel, on_hopper, served, monkeypatch
):
    monkeypatch.setattr(fp8_triton, "is_hopper", lambda device: on_hopper)
    matrix = torch.zeros(24, depth).to(torch.float8_e4m3fn)
    weight = Fp8DeviceWeight(matrix, torch.ones(24, *groups), rounding)
    weight.matmul(torch.zeros(rows, depth, dtype=torch.float16))
    assert served == [kernel if on_hopper else "tiled_product"]


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
from sametoken.ops.model.gemm.tuning import GemmShape, streamed_config
streamed_hopper.pdl_options = lambda x: {"PDL": True, "launch_pdl": True}
e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
def product(rows, features, depth, epilogue="none", dtype=bf16, given=torch.float16):
    given = given if dtype == e4m3 else dtype
    scaling = None
    if dtype == e4m3:
        scaling = Scaling(torch.empty(features), torch.empty(rows), given)
    bias = torch.empty(features, dtype=given) if epilogue == "bias" else None
    x, matrix = (torch.empty(n, depth, dtype=dtype) for n in (rows, features))
    config = streamed_config(GemmShape(features, depth, epilogue), rows, x.itemsize)
    streamed_hopper.product(config, x, matrix, epilogue, bias, scaling)
product(1, 4096, 12288)
product(8, 4096, 12288)
product(3, 24576, 4096, "silu_mul")
product(8, 6144, 4096, dtype=e4m3)
product(8, 24576, 4096, "silu_mul", dtype=e4m3)
product(64, 6144, 4096, "bias", dtype=torch.float16)
product(100, 1000, 2896)
product(3, 1, 2048, "logits")
product(9, 2 * 1352, 2688, "silu_mul")
product(32, 576, 2880, "bias", dtype=e4m3, given=torch.float32)
product(16, 28672, 4096, "silu_mul")
product(128, 24576, 4096, "silu_mul")
# As with newer Tritons, whose views stay inside.
streamed_hopper.VIEWS_REACH_FURTHER = False
product(1, 4096, 12288)
product(64, 6144, 4096)
"""
    compile_launches(code, cache)
    return [(file.read_text(), file) for file in cache.rglob("streamed_kernel.ptx")], cache


def test_weights_are_loaded_early_and_activations_after_the_wait(compiled):
    """What is stored needs activations, so it too comes after the kernels before."""
    kernels, _ = compiled
    # One row and eight are one kernel.
    assert len(kernels) == (13 if VIEWS_REACH_FURTHER else 12)
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
    assert sum("k32.f32.e4m3.e4m3" in kernel for kernel, _ in kernels) == 3
    assert sum("k16.f32.f16.f16" in kernel for kernel, _ in kernels) == 1


def test_the_next_kernel_starts_at_once(compiled):
    assert all("launch_dependents" in kernel for kernel, _ in compiled[0])


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled[1])

"""Products of few rows on Hopper: which they are, what they compute, how they are compiled.

Their bits are compared in Python here (``gluon_interpreter``), and with those of other kernels on a
chip, in tests/gpu/test_gemm_gpu.py and test_quantized_gpu.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from helpers.compiled import compile_launches, unused_barriers
from helpers.exact_products import assert_gated, assert_rounded
from helpers.gluon_interpreter import interpreted
from helpers.grouped_products import GROUPED, operands, sums_of
from sametoken.ops.hopper import MULTIPROCESSORS
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
    StreamedConfig,
    streamed_config,
)
from sametoken.ops.triton import DeviceWeight
from sametoken.ops.triton_versions import VIEWS_REACH_FURTHER
from sametoken.ops.weight import BY_ROW

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
            grouped = {streamed_config(shape, count, 1, grouped=True) for count in rows}
            assert len(grouped) == 1


def test_tiles_of_many_rows_fit(launched):
    """Gated ones; others have the tiles of fewer rows."""
    for rows in (65, 128):
        launch(streamed_config(GATED, rows, 2), GATED, rows, torch.bfloat16)
        assert launched.pop()[2]["SLOTS"] >= 2


E4M3 = torch.float8_e4m3fn
#: Tiles of plain products, and of gated ones, whose results are no other.
TILES = [
    StreamedConfig(64, 64, 2),
    *(StreamedConfig(*sizes) for sizes in product((8, 32), (16, 32, 48, 64), (1, 2), (1, 2, 3))),
    StreamedConfig(16, 32, 4),
]
GATED_TILES = [
    *(StreamedConfig(rows, 32, *sizes) for rows, *sizes in product((8, 32), (1, 2), (1, 2, 3))),
    StreamedConfig(128, 32, 1, 3),
]


@dataclass(frozen=True)
class Operands:
    """Of a product; ``bias`` is added if the epilogue says so, ``scaling`` is that of float8."""

    x: torch.Tensor
    matrix: torch.Tensor
    bias: torch.Tensor
    scaling: Scaling | None = None

    @classmethod
    def of(cls, dtype: torch.dtype, rows: int = 21, features: int = 104) -> Operands:
        """Neither rows nor features fill tiles, and the last of five boxes of depth is short."""
        drawn = torch.Generator().manual_seed(0)
        depth = 2 * 264 // dtype.itemsize
        x, matrix = (
            (torch.randn(count, depth, generator=drawn) / 4).to(dtype) for count in (rows, features)
        )
        bias, scales, row_scales = (
            torch.rand(count, generator=drawn) + 0.5 for count in (features, features, rows)
        )
        if dtype != E4M3:
            return cls(x, matrix, bias.to(dtype))
        return cls(x, matrix, bias.bfloat16(), Scaling(scales, row_scales, torch.bfloat16))

    def cut(self, begin: int, end: int) -> Operands:
        """Some rows."""
        scaling = self.scaling and replace(self.scaling, rows=self.scaling.rows[begin:end].clone())
        return replace(self, x=self.x[begin:end].clone(), scaling=scaling)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, matrix = self.x.double(), self.matrix.double()
        if self.scaling is None:
            return x, matrix
        return x * self.scaling.rows.double()[:, None], matrix * self.scaling.features[:, None]


@pytest.fixture
def few(monkeypatch):
    """Two programs with two slots each, so both are used again; no result is there before."""
    monkeypatch.setattr(streamed_hopper, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(streamed_hopper, "_slots", lambda *_: 2)
    output_of = streamed_hopper.output_of
    monkeypatch.setattr(
        streamed_hopper, "output_of", lambda *given: output_of(*given).fill_(torch.nan)
    )


def computed(config, given, epilogue="none", seed=0):
    bias = given.bias if epilogue == "bias" else None
    with interpreted(seed):
        return streamed_hopper.product(config, given.x, given.matrix, epilogue, bias, given.scaling)


@pytest.mark.parametrize(
    ("dtype", "epilogue", "step"),
    [
        (torch.bfloat16, "bias", 1), (torch.float16, "none", 5), (torch.bfloat16, "logits", 5),
        (E4M3, "bias", 5), (E4M3, "logits", 5),
    ],
)  # fmt: skip
def test_all_tiles_give_the_exact_product_with_the_same_bits(dtype, epilogue, step, few):
    given = Operands.of(dtype)
    first = computed(TILES[0], given, epilogue)
    assert_rounded(first, *given.exact(), given.bias if epilogue == "bias" else None)
    for seed, config in enumerate(TILES[1::step]):
        assert torch.equal(computed(config, given, epilogue, seed), first), config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3])
def test_all_tiles_of_gated_products_give_what_is_made_of_plain_ones(dtype, few):
    given = Operands.of(dtype, features=2 * 104)
    first = computed(GATED_TILES[0], given, "silu_mul")
    assert_gated(first, computed(TILES[0], given))
    for seed, config in enumerate(GATED_TILES[1:]):
        assert torch.equal(computed(config, given, "silu_mul", seed), first), config


@pytest.mark.parametrize(
    ("dtype", "epilogue", "config"),
    [
        (torch.bfloat16, "bias", StreamedConfig(16, 48, 2)),
        (torch.float16, "silu_mul", StreamedConfig(16, 32, 2, 3)),
        (E4M3, "silu_mul", StreamedConfig(8, 32, 2)),
        (E4M3, "none", StreamedConfig(32, 64, 2, 2)),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch(dtype, epilogue, config, few):
    """One row alone, tiles that are full or not, and rows that two tiles have."""
    given = Operands.of(dtype, rows=37, features=64)
    whole = computed(config, given, epilogue)
    assert not whole.isnan().any()
    for begin, end in ((0, 1), (36, 37), (5, 12), (20, 36), (1, 18), (3, 36)):
        part = computed(config, given.cut(begin, end), epilogue, seed=begin)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize(
    ("rows", "features", "depth", "epilogue", "config"),
    [
        (5, 104, 272, "none", StreamedConfig(8, 64, 2)),
        (5, 104, 272, "none", StreamedConfig(8, 48, 2)),
        (21, 104, 1040, "bias", StreamedConfig(16, 32, 4)),
        (5, 130, 144, "logits", StreamedConfig(8, 64, 1, 2)),
        (30, 130, 144, "logits", StreamedConfig(32, 64, 2)),
        (21, 208, 400, "silu_mul", StreamedConfig(32, 32, 2)),
        (21, 208, 400, "silu_mul", StreamedConfig(8, 32, 2, 3)),
        (70, 208, 400, "silu_mul", StreamedConfig(64, 32, 2)),
        (70, 104, 272, "none", StreamedConfig(32, 64, 2)),
    ],
)
def test_sums_of_groups_are_added_times_their_scales(rows, features, depth, epilogue, config, few):
    values, matrix, scaling = operands(rows, features, depth)
    expected = sums_of(values, matrix, scaling)
    bias = torch.arange(features).bfloat16() / 8
    if epilogue == "bias":
        expected += bias.float()
    if epilogue == "silu_mul":
        gate, up = expected.bfloat16().float().chunk(2, dim=1)
        expected = gate / (1 + torch.exp(-gate)) * up
    out = computed(config, Operands(values, matrix, bias, scaling), epilogue)
    assert out.dtype == (torch.float32 if epilogue == "logits" else torch.bfloat16)
    assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.parametrize("config", [StreamedConfig(8, 48, 2, 3), StreamedConfig(32, 16, 1, 2)])
def test_warps_take_any_turns(config, few):
    given = Operands.of(torch.bfloat16)
    first = computed(config, given)
    for seed in range(1, 7):
        assert torch.equal(computed(config, given, seed=seed), first)


@pytest.mark.parametrize("features", [16, 32, 48, 64])
def test_newer_tritons_have_the_same_bits(features, few, monkeypatch):
    """Their views stay inside: a warp group has 64 rows of shared memory for fewer weights."""
    given, config = Operands.of(torch.bfloat16), StreamedConfig(16, features, 2, 2)
    reaching = computed(config, given)
    monkeypatch.setattr(streamed_hopper, "VIEWS_REACH_FURTHER", not VIEWS_REACH_FURTHER)
    assert torch.equal(computed(config, given), reaching)


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
        (272, 32, GROUPED, (), "tiled_product"),
        (272, 32, GROUPED, (3,), "product"),
        (272, 64, GROUPED, (3,), "product"),
        (272, 2049, GROUPED, (3,), "tiled_product"),
    ],
)
def test_float8_is_streamed_if_rows_and_features_have_scales_alike(
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
    assert streamed_config(GATED, 64, 1, grouped=True)
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


@pytest.mark.parametrize(
    ("shape", "block_rows"),
    [
        (GemmShape(4096, 12288), {64: 32, 128: 64, 192: None}),
        (GemmShape(6144, 4096), {64: 64, 65: None}),
        (GemmShape(1024, 2048, "silu_mul"), {64: 32, 256: 32, 512: 64, 2048: None}),
        (GATED, {64: 64, 65: None}),
        (GemmShape(1, 2048), {64: 32, 2048: 32, 2049: None}),
    ],
)
def test_tiles_of_groups_are_small_while_all_run_at_once(shape, block_rows):
    for rows, expected in block_rows.items():
        config = streamed_config(shape, rows, 1, grouped=True)
        assert (config and config.block_rows) == expected
    assert streamed_config(shape, 32, 1, grouped=True).block_rows == 32


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
def product(rows, features, depth, epilogue="none", dtype=bf16, given=torch.float16, groups=()):
    given = given if dtype == e4m3 else dtype
    scaling = None
    if dtype == e4m3:
        scaling = Scaling(torch.empty(features, *groups), torch.empty(rows, *groups), given)
    bias = torch.empty(features, dtype=given) if epilogue == "bias" else None
    x, matrix = (torch.empty(n, depth, dtype=dtype) for n in (rows, features))
    shape = GemmShape(features, depth, epilogue)
    config = streamed_config(shape, rows, x.itemsize, grouped=bool(groups))
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
product(3, 6144, 4096, dtype=e4m3, groups=(32,))
product(32, 2 * 1536, 2896, "silu_mul", dtype=e4m3, groups=(23,))
product(64, 24576, 4096, "silu_mul", dtype=e4m3, groups=(32,))
product(64, 24576, 4096, dtype=e4m3, groups=(32,))
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
    assert len(kernels) == (17 if VIEWS_REACH_FURTHER else 16)
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
    assert sum("k32.f32.e4m3.e4m3" in kernel for kernel, _ in kernels) == 7
    assert sum("k16.f32.f16.f16" in kernel for kernel, _ in kernels) == 1


def test_the_next_kernel_starts_at_once(compiled):
    assert all("launch_dependents" in kernel for kernel, _ in compiled[0])


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled[1])

"""Batch invariance of the GEMM family on a chip: equal bits, whatever the rows and the kernel."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.activation_triton import silu_mul
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.selfcheck import ProvenTable
from sametoken.ops.model.gemm.tuning import (
    CANONICAL,
    MANY_ROWS,
    ROW_BUCKETS,
    CublasConfig,
    GemmShape,
    GemmTable,
    StreamedConfig,
    TritonConfig,
    default_config,
    in_order_config,
)
from sametoken.ops.triton import DeviceWeight

ON_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))

CONFIGS = [
    TritonConfig(16, 16, 256, num_warps=2, num_stages=4),
    TritonConfig(16, 32, 256, num_warps=4, num_stages=3),
    TritonConfig(16, 64, 128, num_warps=4, num_stages=4, tma=True, pdl=True),
    TritonConfig(32, 32, 128, num_warps=4, num_stages=3, pdl=True),
    TritonConfig(16, 64, 128, num_warps=4, num_stages=5, pdl=True, prefetch_bytes=0),
    TritonConfig(32, 64, 128, num_warps=4, num_stages=4, tma=True),
    TritonConfig(64, 64, 64, num_warps=4, num_stages=5, tma=True),
    TritonConfig(64, 128, 64, num_warps=4, num_stages=3),
    TritonConfig(128, 64, 64, num_warps=4, num_stages=3),
    TritonConfig(128, 128, 64, num_warps=8, num_stages=3, tma=True),
    TritonConfig(16, 64, 64, num_warps=4, num_stages=10),
    TritonConfig(16, 32, 256, num_warps=4, num_stages=5, tma=True),
    TritonConfig(16, 64, 128, num_warps=4, num_stages=5, tma=True),
    TritonConfig(32, 64, 64, num_warps=4, num_stages=9, tma=True),
    TritonConfig(64, 64, 64, num_warps=4, num_stages=8, tma=True),
    TritonConfig(128, 64, 128, num_warps=4, num_stages=3, tma=True),
]
STREAMED = [
    StreamedConfig(8, 32, boxes=4),
    StreamedConfig(16, 48, boxes=2),
    StreamedConfig(32, 64, boxes=2),
    StreamedConfig(64, 32, boxes=2),
    StreamedConfig(64, 64, boxes=1),
    StreamedConfig(8, 32, boxes=2, warp_groups=2),
    StreamedConfig(64, 32, boxes=1, warp_groups=3),
    StreamedConfig(128, 32, boxes=1, warp_groups=3),
]
EPILOGUES = ["none", "bias", "silu_mul", "logits"]
ROW_COUNTS = [1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64, 65, 100, 128, 160, 200, 256, 300, 511, 512]


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def bias_of(epilogue, features, dtype=torch.bfloat16):
    return normal(features, dtype=dtype, seed=2) if epilogue == "bias" else None


def by_canonical(x, matrix, epilogue, bias):
    parts = [x[at : at + 16] for at in range(0, len(x), 16)]
    return torch.cat([product(CANONICAL, part, matrix, epilogue, bias) for part in parts])


@pytest.mark.parametrize(
    ("features", "depth", "epilogue", "dtype"),
    [(1024, 4096, epilogue, torch.bfloat16) for epilogue in EPILOGUES]
    + [(576, 576, "none", torch.bfloat16), (400, 1544, "none", torch.bfloat16)]
    + [(1024, 4096, "none", torch.float16)],
)
def test_every_kernel_and_row_count_gives_the_same_rows(features, depth, epilogue, dtype):
    x, matrix = normal(512, depth, dtype=dtype), normal(features, depth, dtype=dtype, seed=1)
    bias = bias_of(epilogue, features, dtype)
    expected = by_canonical(x, matrix, epilogue, bias)
    # Gated, their tiles do not fit in shared memory.
    many = MANY_ROWS if ON_HOPPER and epilogue != "silu_mul" else ()
    for config in (*CONFIGS, *many):
        for rows in ROW_COUNTS:
            out = product(config, x[:rows], matrix, epilogue, bias)
            assert torch.equal(out, expected[:rows]), (config, rows)


@pytest.mark.skipif(not ON_HOPPER, reason="these kernels are Hopper's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("features", "depth"), [(1008, 2888), (6144, 4096), (48, 264), (16, 72)])
def test_streamed_products_have_the_canonical_bits(features, depth, epilogue, dtype):
    """NaN around activations and weights."""
    memory = torch.full((140, depth), torch.nan, device="cuda", dtype=dtype)
    memory[4:134] = normal(130, depth, dtype=dtype)
    weights = torch.full((features + 128, depth), torch.nan, device="cuda", dtype=dtype)
    weights[64 : 64 + features] = normal(features, depth, dtype=dtype, seed=1)
    x, matrix, bias = memory[4:134], weights[64 : 64 + features], bias_of(epilogue, features, dtype)
    expected = by_canonical(x, matrix, epilogue, bias)
    assert expected.isfinite().all()
    for config in STREAMED:
        if epilogue == "silu_mul" and config.block_features != 32:
            continue
        for rows in (1, 3, 8, 9, 33, 64, 65, 128, 130):
            out = product(config, x[:rows], matrix, epilogue, bias)
            assert torch.equal(out, expected[:rows]), (config, rows)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("features", [8, 16, 576, 4096, 8192, 24576])
@pytest.mark.parametrize("hopper", [True, False])
def test_defaults_of_every_bucket_give_the_same_rows(features, epilogue, hopper):
    x, matrix = normal(2048, 4096), normal(features, 4096, seed=1)
    bias, shape = bias_of(epilogue, features), GemmShape(features, 4096, epilogue)
    expected = by_canonical(x, matrix, epilogue, bias)
    for rows in ROW_BUCKETS:
        configs = {in_order_config(shape, rows, hopper)}
        if ON_HOPPER or not hopper:
            configs.add(default_config(shape, rows, hopper))
        # cuBLAS has to prove itself.
        for config in configs - {CublasConfig()}:
            out = product(config, x[:rows], matrix, epilogue, bias)
            assert torch.equal(out, expected[:rows]), config


@pytest.mark.parametrize("config", [*CONFIGS, *((*STREAMED, *MANY_ROWS) if ON_HOPPER else ())])
def test_a_row_cannot_tell_its_place_or_its_company(config):
    x, matrix = normal(96, 2048), normal(512, 2048, seed=1)
    expected = product(CANONICAL, x[:1].contiguous(), matrix)
    poisoned = torch.full_like(x, torch.nan)
    for place in (0, 1, 15, 16, 63, 95):
        poisoned.fill_(torch.nan)
        poisoned[place] = x[0]
        assert torch.equal(product(config, poisoned, matrix)[place], expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_close_to_float64(dtype):
    x, matrix = normal(40, 1544, dtype=dtype), normal(400, 1544, dtype=dtype, seed=1)
    exact = x.double() @ matrix.double().T
    weight = DeviceWeight(matrix, GemmTable())
    out = weight.matmul(x)
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[dtype]
    assert (out.double() - exact).norm() / exact.norm() < tolerance
    full = weight.matmul(x, out_dtype=torch.float32)
    assert full.dtype == torch.float32
    # The matrix unit cuts its sums off where float32 arithmetic rounds: up to 2**-24 of the sum
    # for each of K / 16 additions of a block of products.
    bound = 1e-6 if dtype is torch.float32 else 1544 / 16 * 2**-24
    assert (full.double() - exact).norm() / exact.norm() < bound


def test_float32_rows_are_equal_too():
    x, matrix = normal(130, 576, dtype=torch.float32), normal(192, 576, dtype=torch.float32)
    weight = DeviceWeight(matrix, GemmTable())
    everything = weight.matmul(x)
    for rows in (1, 5, 16, 64, 130):
        assert torch.equal(weight.matmul(x[:rows]), everything[:rows])


def test_fused_epilogues_equal_the_unfused_path():
    x, matrix = normal(70, 1024), normal(2 * 704, 1024, seed=1)
    weight = DeviceWeight(matrix, GemmTable())
    for rows in (1, 4, 30, 70):
        stored = weight.matmul(x[:rows])
        assert torch.equal(weight.gated_matmul(x[:rows]), silu_mul(stored))


@pytest.mark.parametrize(
    ("features", "depth", "epilogue"),
    [(6144, 4096, "none"), (24576, 4096, "silu_mul"), (4096, 4096, "none"), (4096, 12288, "none")],
)
def test_selfcheck_lets_only_equal_libraries_through(features, depth, epilogue):
    matrix = normal(features, depth, seed=1)
    shape = GemmShape(features, depth, epilogue)
    table = ProvenTable(GemmTable({shape: dict.fromkeys(ROW_BUCKETS, CublasConfig())}))
    table.choose(shape, 1)
    counts = [*range(1, 65), 100, 128, 200, 256, 384, 512, 1000, 2048]
    (report,) = table.prove([matrix], tuple(counts))
    refused = {count for refusal in report.refused for count in refusal.row_counts}
    x, bias = normal(2048, depth), bias_of(epilogue, features)
    expected = by_canonical(x, matrix, epilogue, bias)
    for rows in counts:
        config = table.choose(shape, rows)
        assert isinstance(config, CublasConfig) == (rows not in refused)
        out = product(config, x[:rows], matrix, epilogue, bias)
        assert torch.equal(out, expected[:rows]), (config, rows)


CHAINED = [
    TritonConfig(16, 32, 256, 4, 3, prefetch_bytes=0),
    TritonConfig(16, 32, 256, 4, 3, pdl=True, prefetch_bytes=0),
    TritonConfig(16, 32, 256, 4, 3, pdl=True, prefetch_bytes=1 << 20),
    *([StreamedConfig(8, 32, boxes=4), StreamedConfig(8, 64, boxes=2)] if ON_HOPPER else []),
]


@pytest.mark.parametrize("config", CHAINED)
def test_a_captured_chain_of_dependent_products_replays_the_same_bits(config):
    matrices = [normal(2048, 2048, seed=seed) / 45 for seed in range(8)]
    x = normal(4, 2048)

    def chain(kernel):
        y = x
        for matrix in matrices * 4:
            y = product(kernel, y, matrix)
        return y

    chain(config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(config)
    for seed in range(20):
        x.copy_(normal(4, 2048, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(CANONICAL))

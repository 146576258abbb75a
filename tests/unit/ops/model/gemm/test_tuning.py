from __future__ import annotations

import pytest

from sametoken.ops.model.gemm.tuning import (
    ROW_BUCKETS,
    CublasConfig,
    GemmShape,
    GemmTable,
    TritonConfig,
    default_config,
    in_order_config,
    row_bucket,
    streamed_config,
)

SHAPE = GemmShape(4096, 4096, "bias")
CONFIG = TritonConfig(16, 32, 256, 4, 3, tma=True)


def test_a_row_count_takes_the_smallest_bucket_that_holds_it():
    assert [row_bucket(rows) for rows in (1, 2, 4, 5, 33, 512, 513, 9999)] == [
        1, 4, 4, 8, 64, 512, 2048, 2048,
    ]  # fmt: skip


def test_measured_choice_wins_and_the_default_serves_the_rest():
    table = GemmTable({SHAPE: {4: CONFIG, 64: CublasConfig()}})
    assert table.choose(SHAPE, 3) is CONFIG
    assert table.choose(SHAPE, 40) == CublasConfig()
    assert table.choose(SHAPE, 16) == default_config(SHAPE, 16, hopper=False)
    other = GemmShape(4096, 4096)
    assert table.choose(other, 3) == table.in_order(other, 3) == default_config(other, 3, False)


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "logits"])
@pytest.mark.parametrize("features", [64, 576, 4096, 6144, 24576, 151936])
@pytest.mark.parametrize("hopper", [False, True])
def test_defaults_fit_shared_memory_and_keep_the_chip_busy(features, epilogue, hopper):
    for rows in ROW_BUCKETS:
        config = in_order_config(GemmShape(features, 4096, epilogue), rows, hopper)
        weight_rows = config.block_features * (2 if epilogue == "silu_mul" else 1)
        per_stage = 2 * config.block_depth * (config.block_rows + weight_rows)
        assert per_stage * config.num_stages <= 227 * 1024
        assert config.block_rows >= min(rows, 16)
        assert config.num_warps in (4, 8)


def test_defaults_of_hopper_stream_few_rows_and_are_cublas_for_many():
    even, odd = GemmShape(6144, 4096), GemmShape(6144, 4100)
    for rows in (1, 64):
        assert default_config(even, rows, hopper=True) == streamed_config(even, rows, 2)
        assert default_config(odd, rows, True) == default_config(odd, rows, False)
        assert isinstance(in_order_config(even, rows, hopper=True), TritonConfig)
    assert default_config(even, 65, hopper=True) == CublasConfig()
    assert isinstance(default_config(even, 65, hopper=False), TritonConfig)
    table = GemmTable({SHAPE: {4: CONFIG}}, hopper=True)
    assert table.replaced(SHAPE, 64, CONFIG).choose(even, 65) == CublasConfig()
    assert table.in_order(even, 65).tma
    assert not table.in_order(odd, 65).tma


@pytest.mark.parametrize(
    ("features", "tiles"),
    [
        (2048, {128: (64, 64), 192: (64, 64), 256: (64, 64)}),
        (2560, {128: (64, 64), 192: (64, 64), 256: (128, 64)}),
        (4096, {128: (64, 64), 192: (128, 64), 256: (128, 64), 384: (128, 128)}),
        (5120, {128: (128, 64), 192: (64, 128), 256: (128, 128), 2048: (128, 128)}),
    ],
)
def test_tiles_of_many_rows_are_those_measured_fastest(features, tiles):
    """Down projections of four models on an H100 (benchmarks/results/h200-kernels.md)."""
    shape = GemmShape(features, 4 * features)
    for rows, tile in tiles.items():
        below = max(bucket for bucket in ROW_BUCKETS if bucket < rows) + 1
        for count in (below, rows):
            config = in_order_config(shape, count, hopper=True)
            assert (config.block_rows, config.block_features) == tile


def test_gated_products_that_fill_rounds_have_tiles_of_128():
    """Llama-3-8B's and Qwen3-8B's, as measured."""
    llama, qwen = (GemmShape(2 * features, 4096, "silu_mul") for features in (14336, 12288))
    tiled = [
        rows
        for rows in range(65, 600)
        if default_config(llama, rows, hopper=True) == in_order_config(llama, rows, hopper=True)
    ]
    assert tiled == [*range(65, 129), *range(193, 257)]
    assert default_config(llama, 256, hopper=True).block_features == 128
    assert default_config(qwen, 256, hopper=True) == CublasConfig()


@pytest.mark.parametrize(
    ("shape", "row_counts"),
    [
        # Down projections of Qwen3-1.7B and 8B, o and qkv of 8B; gate and up of 1.7B, 4B, 8B, 14B,
        # Llama-3-8B.
        (GemmShape(2048, 6144), range(65, 129)),
        (GemmShape(4096, 12288), ()),
        (GemmShape(4096, 4096), range(65, 129)),
        (GemmShape(6144, 4096), ()),
        (GemmShape(2 * 6144, 2048, "silu_mul"), range(65, 129)),
        (GemmShape(2 * 9728, 2560, "silu_mul"), range(65, 129)),
        (GemmShape(2 * 12288, 4096, "silu_mul"), range(65, 129)),
        (GemmShape(2 * 17408, 5120, "silu_mul"), ()),
        (GemmShape(2 * 14336, 4096, "silu_mul"), ()),
    ],
    ids=str,
)
def test_products_of_many_rows_are_streamed_where_that_was_faster(shape, row_counts):
    streamed = [rows for rows in range(65, 600) if streamed_config(shape, rows, 2)]
    assert streamed == [*row_counts]
    assert not any(streamed_config(shape, rows, 1) for rows in range(65, 600))


def test_a_replaced_choice_leaves_the_others_and_the_old_table_alone():
    table = GemmTable({SHAPE: {4: CONFIG, 64: CublasConfig()}})
    other = default_config(SHAPE, 64, hopper=False)
    changed = table.replaced(SHAPE, 64, other)
    assert changed.choose(SHAPE, 64) == other
    assert changed.choose(SHAPE, 4) is CONFIG
    assert table.choose(SHAPE, 64) == CublasConfig()

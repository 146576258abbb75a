"""Latent attention in Triton under the interpreter: values, masks, poison and launch forms.

The interpreter multiplies through numpy, whose order of additions follows the shape, so rows
are compared closely here and by their bits on the chip (tests/gpu/test_latent_attention_gpu.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.latent_scene import LatentScene
from helpers.rows import runs_of
from sametoken.errors import InvariantError
from sametoken.ops.backend import RowRuns
from sametoken.ops.model.latent_attention.triton import attention
from sametoken.ops.model.latent_attention.tuning import LatentConfig, choose, fitted, heads_per_tile

SEQUENTIAL = LatentConfig("sequential", 16, tile=64, num_warps=4, num_stages=1)
SPLIT_KV = replace(SEQUENTIAL, form="split_kv", programs=3)
CONFIGS = (
    SEQUENTIAL,
    SPLIT_KV,
    replace(SPLIT_KV, block_queries=32),
    replace(SEQUENTIAL, kv_left=True),
    replace(SPLIT_KV, kv_left=True),
)
SCALE = 0.3


def check(scene, where, runs, **options):
    q, rows = scene.rows(where, runs)
    live = rows.slots < len(scene.vectors)
    out = attention(q, SCALE, rows, scene.memory, **options)
    expected = scene.expected(q[live], replace(rows, positions=rows.positions[live],
                                               slots=rows.slots[live]), SCALE)  # fmt: skip
    torch.testing.assert_close(out[live].double(), expected, rtol=3e-6, atol=3e-6)
    assert (out[~live] == 0).all()


@pytest.mark.parametrize("scale", [None, 0.3], ids=["wide", "float8"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(1, 16, 8), (5, 24, 8), (20, 40, 16)])
def test_odd_heads_and_sizes(heads, rank, rope_dim, config, scale):
    sizes = {"heads": heads, "rank": rank, "rope_dim": rope_dim, "scale": scale}
    scene = LatentScene([70, 33], block_size=24, **sizes)
    check(scene, [(0, 69), (1, 31), (0, 0)], RowRuns.even(3, 1), config=config)


@pytest.mark.parametrize("config", CONFIGS)
def test_windows_across_borders_of_splits(config):
    scene = LatentScene([1100, 520], block_size=64)
    where = [(0, 1023), (0, 1024), (0, 1025), (1, 255), (1, 256), (1, 257)]
    check(scene, where, RowRuns.even(2, 3), config=config)


# What a dead row leaves unwritten is merged, and not used.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("scale", [None, 1.7], ids=["wide", "float8"])
@pytest.mark.parametrize("config", CONFIGS)
def test_ragged_runs_with_dead_rows(config, scale):
    scene = LatentScene([300, 40, 9], block_size=32, scale=scale)
    where = [(0, 298), (0, 299), (3, 0), (2, 8), (1, 5), (1, 6), (1, 7), (1, 8), (1, 9)]
    check(scene, where, runs_of([3, 1, 5], num_short=2), config=config)
    padded = replace(runs_of([3, 1, 0, 5, 0, 0], num_short=2), max_rows=40)
    check(scene, where, padded, config=config)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("config", CONFIGS[:2])
def test_a_fault_stays_with_the_queries_that_see_it(config):
    scene = LatentScene([90])
    position = 60
    block = scene.table[0, position // 16]
    scene.memory.vectors[block, position % 16, 24:] = torch.nan
    q, rows = scene.rows([(0, 59), (0, 60), (0, 61)], RowRuns.even(1, 3))
    out = attention(q, SCALE, rows, scene.memory, config=config)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


def test_rows_without_runs_are_refused():
    q, rows = LatentScene([9]).rows([(0, 3)])
    with pytest.raises(InvariantError, match="runs"):
        attention(q, SCALE, rows, LatentScene([9]).memory)


@pytest.mark.parametrize(("heads", "most", "expected"), [(20, 64, 20), (128, 64, 64), (16, 16, 16)])
def test_a_tile_has_whole_shares_of_the_heads(heads, most, expected):
    assert heads_per_tile(heads, most) == expected


def test_few_queries_share_a_context_and_many_fill_the_chip():
    few = choose(8, 1, 20, 16384, torch.bfloat16)
    many = choose(1, 2048, 20, 16384, torch.bfloat16)
    assert (few.form, many.form) == ("split_kv", "sequential")
    assert few.block_queries == many.block_queries == 32
    assert fitted(many, 99 << 10).block_queries == 16
    assert few.tile == many.tile, "the tile is part of the arithmetic"


@pytest.mark.parametrize(("capability", "numbers"), [(89, (1, 1, 1)), (90, (4, 2, 4))])
def test_launches_of_real_sizes_fit_a_gpu(tmp_path, capability, numbers):
    """In fp32, where tiles are small and take the compiler long, of vectors that are narrower.

    In windows, and in chunks, among which programs look for theirs.
    """
    code = """
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.latent_attention import triton

triton.shared_memory = lambda tensor: memory

def launch(
    heads, runs, width, max_blocks, rank=512, dtype=torch.bfloat16, scale=None, chunks=False
):
    rows = runs * width
    slots = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(2, max_blocks, dtype=torch.int64)
    starts = torch.arange(runs + 1) * width
    cut = RowRuns(runs, width, starts, 0 if chunks else runs, width)
    where = AttentionRows(slots, slots, slots, table, cut)
    stored = dtype if scale is None else torch.float8_e4m3fn
    layer = LayerLatent(torch.zeros(2, 16, rank + 64, dtype=stored), rank, scale)
    triton.attention(torch.zeros(rows, heads, rank + 64, dtype=dtype), 0.1, where, layer)

launch(20, 8, 9, 1024, chunks=True)
launch(128, 64, 3, 128, chunks=True)
if memory > 200 << 10:
    launch(16, 1, 1, 1024)
    launch(16, 2, 3, 64, 128, torch.float32)
    launch(16, 1, 1, 1024, scale=torch.ones(1))
    launch(128, 64, 3, 128, scale=torch.ones(1))
"""
    compile_launches(code, tmp_path, capability)
    kernels = ("_merge_kernel", "_sequential_kernel", "_split_kv_kernel")
    assert tuple(len(list(tmp_path.rglob(f"{kernel}.ptx"))) for kernel in kernels) == numbers

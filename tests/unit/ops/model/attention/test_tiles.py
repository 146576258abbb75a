"""Query tiles of launches over runs: each row is in one, and padding has few of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention import triton as attention
from sametoken.ops.model.attention.tiles import Tiles, most_tiles, tile_rows, tiles_of
from sametoken.ops.model.latent_attention import triton as latent_attention
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.model.latent_attention.tuning import LatentConfig

TILE, WIDTH = 4, 40


def rows_of(runs, num_rows, num_slots=200):
    """Rows without content, of an engine with this number of slots."""
    numbers = torch.zeros(num_rows, dtype=torch.int64)
    return AttentionRows(numbers, numbers, numbers, torch.zeros(num_slots + 1, 4).long(), runs)


def long_runs(lengths, num_short=0):
    """Runs of at most ``WIDTH`` rows, short ones at most ``TILE``."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return RowRuns(len(lengths), WIDTH, starts, num_short, TILE)


@pytest.mark.parametrize("heads", [1, 20])
def test_padding_runs_add_a_tile_each_at_most(heads):
    for sizes in ([1, 4, 0, 17, 99, 110], [33, 33, 33], [32, 1, 1, 1], [0, 0, 1]):
        queries = [size * heads for size in sizes]
        needed = sum(-(-size // 32) for size in queries)
        most = most_tiles(len(sizes), max(queries), sum(queries), 32)
        assert needed <= most <= needed + len(sizes)
    assert most_tiles(1, 4096, 4096, 32) == 128
    assert most_tiles(8, 4096, 4096, 32) == 135
    assert most_tiles(256, 1, 4096, 16) == 256


@triton.jit
def _tile_rows_kernel(
    starts,  # as for tile_rows
    first_run,
    num_runs,
    width,
    found,  # [programs, 4] int64: what tile_rows returns
    TILE_ROWS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    begin, first, stop, place = tile_rows(starts, first_run, num_runs, width, TILE_ROWS, BLOCK_RUNS)
    found += tl.program_id(0) * 4
    tl.store(found, begin)
    tl.store(found + 1, first)
    tl.store(found + 2, stop)
    tl.store(found + 3, place)


@pytest.mark.parametrize(
    "lengths",
    [
        [1, 0, 2, 0, 0, 37, 4, 0, 1, 3, 0, 0, 8, 5],
        [0, 0, 0, 40, 0, 0],
        [40, 40, 1],
        [3] * 150,
        [0, 0, 0, 0],
    ],
)
@pytest.mark.parametrize("short", [[], [2, 1]])
@pytest.mark.parametrize("tile", [TILE, 1])
def test_every_row_of_a_run_is_in_one_tile(lengths, short, tile):
    """Of tiles and of rows to merge; the tiles of a run with the most KV come first."""
    lengths = [*short, *lengths]
    runs = long_runs(lengths, len(short))
    rows, group = rows_of(runs, max(1, sum(lengths))), runs.groups[-1]
    tiles = tiles_of(rows, group, TILE)
    assert tiles.block_runs >= group.num_runs
    found = torch.full((tiles.count if tile == TILE else tiles.merged, 4), -1)
    _tile_rows_kernel[(len(found),)](
        runs.starts, *group, found, TILE_ROWS=tile, BLOCK_RUNS=tiles.block_runs
    )
    expected = []
    for run, begin in enumerate(runs.starts[group.first : -1].tolist()):
        stop = begin + lengths[len(short) + run]
        firsts = reversed(range(begin, stop, tile))
        expected += [
            [begin, first, min(first + tile, stop), run * WIDTH + first - begin] for first in firsts
        ]
    assert found[: len(expected)].tolist() == expected
    assert (found[len(expected) :, 1] >= found[len(expected) :, 2]).all()


def test_windows_and_few_chunks_are_cut_without_a_search():
    """So are runs of one length, and those of few tiles each."""
    starts = torch.arange(41)
    for runs in (
        RowRuns.even(40, WIDTH),
        RowRuns(40, WIDTH, starts, 40, WIDTH),
        RowRuns(2, WIDTH, starts[:3], 0, 0),
        RowRuns(40, 2 * TILE, starts, 0, 0),
    ):
        (group,) = runs.groups
        tiles_per_run = -(-group.max_rows // TILE)
        even = Tiles(group.num_runs * tiles_per_run, group.num_runs * group.max_rows, 0)
        assert tiles_of(rows_of(runs, 1600), group, TILE) == even


def test_kernels_of_an_engine_look_among_as_many_runs_in_every_step():
    found = {
        tiles_of(rows_of(runs, 640), runs.groups[-1], TILE).block_runs
        for runs in (long_runs([40] * 3), long_runs([4] * 160), long_runs([1] * 200, 100))
    }
    assert found == {256}


@dataclass
class Noted:
    """In place of kernels: notes the grids of launches."""

    grids: list = field(default_factory=list)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.grids.append(grid)


def launch_heads(rows, num_rows, form):
    """Tiles of four rows, two KV heads."""
    q, kv = torch.zeros(num_rows, 8, 16), LayerKV(*torch.zeros(2, 4, 2, 16, 16))
    config = attention.AttentionConfig(form, 16, 4, 2)
    attention.attention(q, AttentionShape(8, 2, 16), rows, kv, config=config)


def launch_latents(rows, num_rows, form):
    """Tiles of four rows, one of heads."""
    q, memory = torch.zeros(num_rows, 4, 24), LayerLatent(torch.zeros(4, 16, 24), 16)
    config = LatentConfig(form, 16, tile=64, num_warps=4, num_stages=1)
    latent_attention.attention(q, 1.0, rows, memory, config=config)


@pytest.mark.parametrize(
    ("module", "launch"), [(attention, launch_heads), (latent_attention, launch_latents)]
)
def test_launches_of_padded_chunks_have_the_programs_that_rows_can_need(
    module, launch, monkeypatch
):
    noted = Noted()
    for kernel in ("_sequential_kernel", "_split_kv_kernel", "_merge_kernel"):
        monkeypatch.setattr(module, kernel, noted)
    num_runs, num_rows = 128, 1024
    starts = torch.full((num_runs + 1,), num_rows)
    runs = RowRuns(num_runs, num_rows, starts, 0, 0)
    for form in ("sequential", "split_kv"):
        launch(rows_of(runs, num_rows), num_rows, form)
    sequential, split_kv, merge = (grid[0] for grid in noted.grids)
    assert sequential == split_kv <= num_rows // 4 + num_runs
    assert merge == num_rows

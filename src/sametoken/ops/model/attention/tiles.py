"""Query tiles of launches over runs: how many programs there are, and which tile a program has."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import QueryRows, RunGroup
from sametoken.ops.launch_sizes import cdiv, next_power_of_2


def most_tiles(num_runs: int, width: int, num_rows: int, tile: int) -> int:
    """Most tiles of ``tile`` rows that runs have, each with a last tile of its own.

    ``width`` limits the rows of a run, ``num_rows`` those of all. If heads lie side by side in a
    tile, all three count queries.
    """
    return min(num_runs * cdiv(width, tile), (num_rows + num_runs * (tile - 1)) // tile)


def block_runs(table: Tensor, group: RunGroup) -> int:
    """Runs that a program looks at: in an engine one number, whatever the step, for one kernel."""
    size: int = next_power_of_2(max(len(table) - 1, group.num_runs))
    return max(128, size)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the Triton kernels cut a group of runs into query tiles, each a program's.

    Attributes:
        count: query tiles.
        merged: of one row each, where a second kernel merges.
        block_runs: 0: every run has the tiles of the longest; else the number of runs, a power of
            two, among which a program looks for its own.
    """

    count: int
    merged: int
    block_runs: int


def tiles_of(rows: QueryRows, group: RunGroup, tile: int) -> Tiles:
    """Tiles of up to ``tile`` rows of a group of these rows' runs.

    Of chunks of prompts a padded step has many without rows, so programs look for their runs; not
    where there can be at most twice too many programs, nor in windows. The number of rows does not
    decide, so that few steps launch every kernel at start-up.
    """
    runs, (_, num_runs, width) = rows.runs, group
    assert runs is not None
    tiles_per_run = cdiv(width, tile)
    if runs.starts is None or not runs.are_long(group) or min(num_runs, tiles_per_run) <= 2:
        return Tiles(num_runs * tiles_per_run, num_runs * width, 0)
    num_rows = len(rows.positions)
    count, merged = (most_tiles(num_runs, width, num_rows, rows_each) for rows_each in (tile, 1))
    return Tiles(count, merged, block_runs(rows.block_table, group))


#: Of kernels over runs: values that change from step to step must not trigger a compilation.
jit_over_runs = triton.jit(
    do_not_specialize=["first_run", "num_runs", "width", "max_splits"],
    do_not_specialize_on_alignment=["starts"],
)


@triton.jit
def tile_rows(
    starts, first_run, num_runs, width, TILE_ROWS: tl.constexpr, BLOCK_RUNS: tl.constexpr
):
    """This program's query tile: its run's first row, its first row, its end row, and its index.

    The index counts the launch's rows as if all of its runs had ``width`` rows. A program without
    a tile ends where it begins. ``BLOCK_RUNS`` is that of ``Tiles``.
    """
    if BLOCK_RUNS:
        tile = tl.program_id(0)
        line = tl.arange(0, BLOCK_RUNS)
        start = starts + first_run + line
        begins = tl.load(start, mask=line < num_runs, other=0)
        tiles = tl.load(start + 1, mask=line < num_runs, other=0) - begins
        following = tl.cumsum(tl.cdiv(tiles.to(tl.int32), TILE_ROWS), 0)
        run = tl.sum((following <= tile).to(tl.int32), 0)
        before = tl.max(tl.where(following <= tile, following, 0), 0)
        begin = tl.load(starts + first_run + run, mask=run < num_runs, other=0).to(tl.int32)
        end = tl.load(starts + first_run + run + 1, mask=run < num_runs, other=0).to(tl.int32)
        # Of a run, the tile with the most KV first.
        last = before + tl.cdiv(end - begin, TILE_ROWS) - 1
        offset = tl.maximum(last - tile, 0) * TILE_ROWS
    else:
        tiles_per_run = tl.cdiv(width, TILE_ROWS)
        run = tl.program_id(0) // tiles_per_run
        offset = (tl.program_id(0) % tiles_per_run) * TILE_ROWS
        if starts is None:
            begin = (first_run + run) * width
            end = begin + width
        else:
            begin = tl.load(starts + first_run + run).to(tl.int32)
            end = tl.load(starts + first_run + run + 1).to(tl.int32)
    first = begin + offset
    return begin, first, tl.minimum(first + TILE_ROWS, end), run * width + offset

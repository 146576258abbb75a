"""Latent attention on Hopper GPUs: which launches it serves, their choice, and the launch.

Runs of more than 32 queries (rows x heads) are cut into tiles of 64, which pairs of warp groups
compute: all splits of a tile in one program (``pair_rows_kernel``), or, where tiles are too few to
fill the chip, splits spread over programs (``pair_splits_kernel``). Runs of fewer, as in decode,
are spread by ``splits_kernel``. ``join_kernel`` joins what no program had whole. All share one
order of sums, so a row has the same bits. On other chips the kernels of ``triton`` serve.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.backend import QueryRows, RunGroup
from sametoken.ops.hopper import MULTIPROCESSORS, is_hopper
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.hopper import reads_earlier_passes
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.attention.schedule import max_splits
from sametoken.ops.model.attention.scratch import Launches, Scratch, most_bytes, of_splits
from sametoken.ops.model.attention.tiles import block_runs, most_tiles
from sametoken.ops.model.attention.tuning import LOG2_E, MAX_PARTIAL_BYTES
from sametoken.ops.model.latent_attention.hopper_kernels import join_kernel, splits_kernel
from sametoken.ops.model.latent_attention.hopper_pair_kernels import (
    pair_rows_kernel,
    pair_splits_kernel,
)
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.pdl import pdl_options

RANK, WIDTH = 512, 576

#: Multiprocessors that programs of whole rows have to keep busy, over all their rounds. Below, it
#: is faster to share splits evenly and to join them, which costs a sixth to a fourth.
BUSY_PROGRAMS = 100

#: Most query tiles of a launch of splits: each program looks at all of them. Of few tiles, with a
#: kernel of its own.
MAX_TILES, FEW_TILES = 1024, 256

#: Queries of a tile of the kernels of whole rows.
PAIR_QUERIES = 64


@dataclass(frozen=True, slots=True)
class LatentHopperConfig:
    """Sizes of a launch, none of which affects bits.

    Attributes:
        queries: rows x heads of a query tile: 16, 32 or 64.
        programs: of a launch of splits; 0, with 64 queries: a program computes whole rows.
        joins: with 16 queries: programs join the splits that they have of a tile.
    """

    queries: int
    programs: int
    joins: bool = False


#: By queries of a tile.
CONFIGS = {queries: LatentHopperConfig(queries, 128) for queries in (16, 32, 64)}

#: Where programs join splits, and the query tiles from which whole steps are faster: a program has
#: all splits of most of its tiles then. With 32 queries, steps are slower.
JOINING = LatentHopperConfig(16, 128, joins=True)
JOINING_TILES = 128

WHOLE_ROWS = LatentHopperConfig(PAIR_QUERIES, 0)

#: Of the kernels of pairs, by bytes of an element: warps of the first of both warp groups,
#: registers of a thread, on average over warps, in a pair, and in the warps beside it; and warps
#: that widen float8.
PAIR_SIZES = {
    itemsize: {
        "num_warps": 4, "maxnreg": 168,
        "PAIR_REGISTERS": of_pair, "LOAD_REGISTERS": of_others, "WIDEN_WARPS": warps,
    }
    for itemsize, of_pair, of_others, warps in ((2, 240, 24, 0), (1, 216, 72, 2))
}  # fmt: skip

#: Of ``splits_kernel``, by bytes of an element, queries of a tile and ``joins``: the same, tiles of
#: 64 vectors in shared memory, registers of a thread that sums, and of one that loads or widens.
#: Beside a program of 16 queries that joins nothing two of ``join_kernel`` fit in a
#: multiprocessor's registers, one of float8. So the join is there when the last split is, and the
#: next layer's splits begin while it runs.
FEW_SIZES = {
    (itemsize, queries, joins): {
        "SLOTS": 2, "num_warps": 4, "maxnreg": registers,
        "SUM_REGISTERS": of_sums, "LOAD_REGISTERS": 40, "WIDEN_WARPS": warps,
    }
    for itemsize, queries, joins, registers, of_sums, warps in (
        (2, 16, False, 96, 96, 0), (2, 16, True, 128, 136, 0), (2, 32, False, 128, 144, 0),
        (1, 16, False, 80, 96, 4), (1, 16, True, 96, 136, 4), (1, 32, False, 96, 144, 4),
    )
}  # fmt: skip

#: Splits that a program of ``join_kernel`` loads at once, by ``joins``, which leaves few. Without a
#: number of registers the compiler moves each load to its use, to save some, and every load waits
#: for the one before it.
JOIN_SIZES = {
    False: {"AHEAD": 8, "num_warps": 2, "maxnreg": 128},
    True: {"AHEAD": 4, "num_warps": 2, "maxnreg": 80},
}


def serves(
    rank: int,
    width: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    block_size: int,
    device: torch.device,
) -> bool:
    """Whether these kernels compute this attention: always or never in an engine.

    ``dtype`` is that of queries, ``stored`` that of vectors.
    """
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and stored in (dtype, FLOAT8)
        and (rank, width) == (RANK, WIDTH)
        and block_size in (16, 32, 64, 128)
    )


@functools.lru_cache(maxsize=1024)
def choose(
    num_runs: int,
    width: int,
    num_rows: int,
    num_heads: int,
    max_seq_len: int,
    *,
    are_chunks: bool = False,
) -> LatentHopperConfig:
    """The configuration of a launch of ``num_runs`` runs of at most ``width`` rows.

    ``num_rows`` limits the rows of all runs together. Runs that ``are_chunks`` of prompts are
    seldom both many and a tile each. Then whole rows serve, a kernel that start-up has compiled.
    """
    queries = min(max(16, next_power_of_2(width * num_heads)), PAIR_QUERIES)
    tiles = num_runs * cdiv(width * num_heads, queries)
    partial_bytes = 4 * num_runs * width * num_heads * RANK * max_splits(max_seq_len)
    one_each = width * num_heads <= queries
    most = FEW_TILES if are_chunks and one_each else MAX_TILES
    fits = tiles <= most and partial_bytes <= MAX_PARTIAL_BYTES
    programs = most_tiles(num_runs, width * num_heads, num_rows * num_heads, queries)
    few = programs < BUSY_PROGRAMS * cdiv(programs, MULTIPROCESSORS)
    if fits and (few or one_each):
        joins = queries == JOINING.queries and tiles >= JOINING_TILES
        return JOINING if joins else CONFIGS[queries]
    return WHOLE_ROWS


def _pair_tiles(group: RunGroup, num_rows: int, num_heads: int) -> int:
    return most_tiles(
        group.num_runs, group.max_rows * num_heads, num_rows * num_heads, PAIR_QUERIES
    )


def scratch_of(
    group: RunGroup, num_rows: int, num_heads: int, max_seq_len: int, config: LatentHopperConfig
) -> Scratch:
    """Memory of a launch beside its result."""
    if config.programs:
        num_places = group.num_runs * group.max_rows
        return of_splits(num_places, num_heads, max_splits(max_seq_len), RANK)
    tiles = _pair_tiles(group, num_rows, num_heads)
    return Scratch(tiles * PAIR_QUERIES * RANK)


def most_scratch(num_heads: int, launches: Launches) -> int:
    """The most bytes of ``scratch_of`` in an engine."""
    max_seq_len = launches.max_seq_len

    def of_launch(num_runs: int, width: int, num_rows: int) -> Scratch:
        config = choose(num_runs, width, num_rows, num_heads, max_seq_len)
        return scratch_of(RunGroup(0, num_runs, width), num_rows, num_heads, max_seq_len, config)

    return most_bytes(of_launch, of_splits(1, num_heads, max_splits(max_seq_len), RANK), launches)


def attention(
    q: Tensor,
    scale: float,
    rows: QueryRows,
    memory: LayerLatent,
    *,
    config: LatentHopperConfig | None = None,
) -> Tensor:
    """Attention of [T, H, 576] queries over their slots' vectors: [T, H, 512] in q's dtype.

    Launches depend on shapes alone, so they can be captured. Rows after the last run are not
    written.

    Args:
        q: contiguous, bf16 or fp16.
        scale: factor on the scores, positive.
        rows: positions and slots of the rows, with their runs.
        memory: the layer's vectors, contiguous, finite in their first 512 elements; of q's dtype,
            or float8 e4m3.
        config: the configuration of all launches; None: ``choose``.
    """
    assert rows.runs is not None
    assert q.shape[2] == memory.vectors.shape[2] == WIDTH
    assert q.is_contiguous()
    assert memory.vectors.is_contiguous()
    out = q.new_empty(*q.shape[:2], RANK)
    max_seq_len = rows.block_table.shape[1] * memory.vectors.shape[1]
    for group in rows.runs.groups if len(q) else ():
        chosen = config or choose(
            group.num_runs, group.max_rows, len(q), q.shape[1], max_seq_len,
            are_chunks=rows.runs.are_long(group),
        )  # fmt: skip
        _launch(q, scale * LOG2_E, rows, memory, out, group, chosen)
    return out


def _launch(
    q: Tensor,
    scale: float,
    rows: QueryRows,
    memory: LayerLatent,
    out: Tensor,
    group: RunGroup,
    config: LatentHopperConfig,
) -> None:
    assert rows.runs is not None
    heads, table, pair = q.shape[1], rows.block_table, config.queries == PAIR_QUERIES
    where = (rows.positions, rows.slots, rows.runs.starts)
    queries = boxes(q, PAIR_QUERIES) if pair else q
    block_size, itemsize = memory.vectors.shape[1], memory.vectors.itemsize
    vectors = boxes(memory.vectors, min(block_size, 64), 64 * itemsize)
    inputs = (queries, vectors, *where, table, memory.scale)
    sizes = PAIR_SIZES[itemsize] if pair else FEW_SIZES[itemsize, config.queries, config.joins]
    constants = {
        "HEADS": heads,
        "BLOCK_SIZE": block_size,
        **sizes,
        **pdl_options(q, early=reads_earlier_passes(rows)),
    }
    scratch = scratch_of(group, len(q), heads, table.shape[1] * block_size, config)
    sums = q.new_empty(scratch.sums, dtype=torch.float32)
    if not config.programs:
        assert pair
        pair_rows_kernel[(_pair_tiles(group, len(q), heads),)](
            *inputs, sums, out, group.first, group.max_rows, group.num_runs, table.stride(0), scale,
            BLOCK_RUNS=block_runs(table, group), **constants,
        )  # fmt: skip
        return
    tiles_per_run = cdiv(group.max_rows * heads, config.queries)
    num_tiles = group.num_runs * tiles_per_run
    most = max_splits(table.shape[1] * block_size)
    stats = q.new_empty(scratch.stats, dtype=torch.float32)
    tile_sizes = (group.first, group.max_rows, tiles_per_run, num_tiles, table.stride(0), most)
    constants["BLOCK_TILES"] = FEW_TILES if num_tiles <= FEW_TILES else MAX_TILES
    num_joined = q.new_empty(num_tiles, dtype=torch.int32) if config.joins else None
    if pair:
        pair_splits_kernel[(config.programs,)](
            *inputs, sums, stats, *tile_sizes, scale, **constants
        )
    else:
        splits_kernel[(config.programs,)](
            *inputs, out, sums, stats, num_joined, *tile_sizes, scale,
            QUERIES=config.queries, JOINS=config.joins, **constants,
        )  # fmt: skip
    join_kernel[group.num_runs * group.max_rows, heads](
        sums, stats, *where, memory.scale, num_joined, out, *tile_sizes[:3],
        config.queries, most, scale, HEADS=heads, PAIR=pair, **JOIN_SIZES[config.joins],
        **pdl_options(q),
    )  # fmt: skip

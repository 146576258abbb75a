"""Causal paged attention on Hopper GPUs: which launches it serves, their choice, and the launch.

``rows_kernel`` computes all splits of a query tile in one program. Where query tiles are too few
to fill the chip, ``splits_kernel`` spreads splits over programs. Both share one arithmetic, so a
row has the same bits. On other chips the kernels of ``triton`` serve.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    QueryRows,
    RunGroup,
)
from sametoken.ops.hopper import is_hopper
from sametoken.ops.hopper_layouts import boxes
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.hopper_kernels import splits_kernel
from sametoken.ops.model.attention.hopper_rows_kernels import rows_kernel
from sametoken.ops.model.attention.hopper_sums import kept_shape
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.attention.schedule import max_splits
from sametoken.ops.model.attention.scratch import Launches, Scratch, most_bytes, of_splits
from sametoken.ops.model.attention.tiles import block_runs, most_tiles
from sametoken.ops.model.attention.tuning import LOG2_E, MAX_PARTIAL_BYTES
from sametoken.ops.pdl import pdl_options

#: Queries of a warp group.
QUERIES = 64

#: Query tiles x KV heads from which programs of whole rows fill the chip.
BUSY_PROGRAMS = 100

#: Queries of a tile that are columns of products. Runs of more have rows.
COLUMNS = (8, 16)

#: Query tiles x KV heads up to which a program has a multiprocessor of its own, and its splits are
#: done sooner. Of more, two share one: while the one begins or ends a query tile, the other loads.
#: The second of tiles of columns. Warps that widen float8 lack registers where two share one.
FEW_PROGRAMS, FEW_COLUMN_PROGRAMS = 128, 32
FEW_WIDENED_COLUMNS = 2048

#: Positions of a window up to which a program of 64 queries is done first, of few rows or many.
SHORT_WINDOW = 256

#: Most query tiles of a launch of splits: each program looks at all of them. Of few tiles, with a
#: kernel of its own.
MAX_TILES, FEW_TILES = 1024, 128

#: Most query tiles x KV heads of a launch of splits.
MAX_COUNTERS = 1 << 17


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Sizes of a launch; ``tile`` alone affects bits.

    Attributes:
        tile: KV positions of a tile.
        slots: tiles of keys or of values that shared memory holds.
        warp_groups: groups of 64 queries in a program; 0: a launch of splits.
        max_registers: per thread, on average over warps.
        programs: of a launch of splits.
        columns: queries of its query tiles, as columns of products; 0: 64, as rows.
        box: most positions of a TMA load; what no query sees is left out by boxes.
    """

    tile: int
    slots: int
    warp_groups: int
    max_registers: int
    programs: int = 128
    columns: int = 0
    box: int = 64


@dataclass(frozen=True, slots=True)
class HopperTable:
    """Launch configurations for heads of one size, as tuned by benchmarks/kernels/hopper_gpu.py.

    Attributes:
        few_columns: splits of few query tiles of columns; their number follows the run's.
        columns: of more such tiles.
        few: splits of few larger query tiles.
        splits: of more.
        narrow: for query tiles that fill the chip only at 64 queries a program.
        wide: for more.
        narrow_width: rows of a run up to which ``narrow`` serves those, too.
    """

    few_columns: HopperConfig
    columns: HopperConfig
    few: HopperConfig
    splits: HopperConfig
    narrow: HopperConfig
    wide: HopperConfig
    narrow_width: int = 0


#: Of heads of 256, for whose splits registers and shared memory have room for one program.
LARGE_COLUMNS = HopperConfig(64, 5, 0, 232, columns=16, box=32)
LARGE_SPLITS = HopperConfig(64, 6, 0, 232)

#: By head size, rounded up.
TABLES = {
    64: HopperTable(
        few_columns=HopperConfig(128, 6, 0, 232, columns=16, box=32),
        columns=HopperConfig(128, 4, 0, 128, programs=256, columns=16, box=32),
        few=HopperConfig(128, 6, 0, 232, box=32),
        splits=HopperConfig(128, 4, 0, 128, programs=256, box=32),
        narrow=HopperConfig(128, 4, 1, 128),
        wide=HopperConfig(128, 4, 2, 168),
        narrow_width=2048,
    ),
    128: HopperTable(
        few_columns=HopperConfig(128, 5, 0, 232, columns=16, box=32),
        columns=HopperConfig(128, 3, 0, 128, programs=256, columns=16, box=32),
        few=HopperConfig(128, 5, 0, 232, box=32),
        splits=HopperConfig(128, 2, 0, 128, programs=256, box=32),
        narrow=HopperConfig(128, 4, 1, 232),
        wide=HopperConfig(128, 4, 2, 168),
    ),
    256: HopperTable(
        few_columns=LARGE_COLUMNS,
        columns=LARGE_COLUMNS,
        few=LARGE_SPLITS,
        splits=LARGE_SPLITS,
        narrow=HopperConfig(64, 4, 1, 248),
        wide=HopperConfig(64, 4, 2, 168),
    ),
}


def serves(
    shape: AttentionShape,
    dtype: torch.dtype,
    stored: torch.dtype,
    block_size: int,
    device: torch.device,
) -> bool:
    """Whether these kernels compute this attention: always or never in an engine.

    ``dtype`` is that of queries, ``stored`` that of keys and values.
    """
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and stored in (dtype, FLOAT8)
        and shape.head_dim * stored.itemsize % 16 == 0
        and shape.head_dim <= max(TABLES)
        and shape.num_heads // shape.num_kv_heads <= QUERIES
        and block_size in (16, 32, 64, 128)
    )


@functools.cache
def table_for(shape: AttentionShape) -> HopperTable:
    """The configurations for heads of this size."""
    return TABLES[_block_dim(shape)]


def columns_of(num_queries: int) -> int:
    """Columns of a query tile for runs of at most ``num_queries``; 0: queries are rows."""
    return next((size for size in COLUMNS if num_queries <= size), 0)


@functools.lru_cache(maxsize=1024)
def choose(
    num_runs: int,
    width: int,
    num_rows: int,
    shape: AttentionShape,
    max_seq_len: int,
    *,
    widens: bool = False,
) -> HopperConfig:
    """The configuration of a launch of ``num_runs`` runs of at most ``width`` rows.

    ``num_rows`` limits the rows of all runs together. ``widens``: KV is in float8.
    """
    table = table_for(shape)
    if shape.sliding_window is not None and shape.sliding_window <= SHORT_WINDOW:
        return table.narrow
    group = shape.num_heads // shape.num_kv_heads
    rows = QUERIES // group
    tiles = num_runs * cdiv(width, rows)
    partial_bytes = 4 * num_runs * width * shape.q_size * max_splits(max_seq_len)
    counters = tiles * shape.num_kv_heads
    many = table.narrow if width <= table.narrow_width else table.wide
    if tiles > MAX_TILES or counters > MAX_COUNTERS or partial_bytes > MAX_PARTIAL_BYTES:
        return many
    programs = most_tiles(num_runs, width, num_rows, rows) * shape.num_kv_heads
    if width * group <= QUERIES // 2 or programs < BUSY_PROGRAMS:
        columns = columns_of(width * group)
        if columns:
            few = FEW_WIDENED_COLUMNS if widens else FEW_COLUMN_PROGRAMS
            config = table.columns if programs > few else table.few_columns
            return replace(config, columns=columns)
        return table.few if widens or programs <= FEW_PROGRAMS else table.splits
    if width <= rows or programs < BUSY_PROGRAMS * table.wide.warp_groups:
        return table.narrow
    return many


def scratch_of(
    group: RunGroup, num_rows: int, shape: AttentionShape, max_seq_len: int, config: HopperConfig
) -> Scratch:
    """Memory of a launch beside its result."""
    if not config.warp_groups:
        num_places = group.num_runs * group.max_rows
        return of_splits(num_places, shape.num_heads, max_splits(max_seq_len), shape.head_dim)
    # Of large heads, shared memory has no room for all sums over splits.
    parts, _, columns = kept_shape(_block_dim(shape), config.warp_groups)
    tile = QUERIES // (shape.num_heads // shape.num_kv_heads) * config.warp_groups
    num_tiles = most_tiles(group.num_runs, group.max_rows, num_rows, tile)
    queries = num_tiles * shape.num_kv_heads * config.warp_groups * QUERIES
    return Scratch(queries * (_block_dim(shape) - parts * columns))


def most_scratch(shape: AttentionShape, launches: Launches) -> int:
    """The most bytes of ``scratch_of`` in an engine."""
    max_seq_len = launches.max_seq_len

    def of_launch(num_runs: int, width: int, num_rows: int) -> Scratch:
        config = choose(num_runs, width, num_rows, shape, max_seq_len)
        return scratch_of(RunGroup(0, num_runs, width), num_rows, shape, max_seq_len, config)

    place = of_splits(1, shape.num_heads, max_splits(max_seq_len), shape.head_dim)
    return most_bytes(of_launch, place, launches)


def counters(device: torch.device) -> Tensor:
    """Counters of stored results, by KV head and query tile; a launch leaves them 0."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def attention(
    q: Tensor,
    shape: AttentionShape,
    rows: QueryRows,
    kv: LayerKV,
    arrived: Tensor,
    sinks: Tensor | None = None,
    *,
    config: HopperConfig | None = None,
) -> Tensor:
    """Attention of [T, H, D] queries over their slots' KV: [T, H * D] in q's dtype.

    Launches depend on shapes alone, so they can be captured. Rows after the last run are not
    written.

    Args:
        q: [T, H, D], contiguous, bf16 or fp16.
        shape: head counts and the sliding window.
        rows: positions and slots of the rows, with their runs.
        kv: the layer's KV, contiguous, in q's dtype or float8 e4m3; values are finite.
        arrived: of ``counters``; launches that may run at the same time need separate ones.
        sinks: [H] fp32, a logit of each head without a value; None: there are none.
        config: the configuration of all launches; None: ``choose``.
    """
    assert rows.runs is not None
    assert q.is_contiguous()
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    out = q.new_empty(len(q), shape.q_size)
    max_seq_len = rows.block_table.shape[1] * kv.keys.shape[2]
    widens = kv.keys.dtype == FLOAT8
    for group in rows.runs.groups if len(q) else ():
        chosen = config or choose(
            group.num_runs, group.max_rows, len(q), shape, max_seq_len, widens=widens
        )
        _launch(q, shape, rows, kv, sinks, out, arrived, group, chosen)
    return out


def reads_earlier_passes(rows: QueryRows) -> bool:
    """Whether earlier passes wrote all KV below a run's first row, so that it may be read early.

    Kept rows are a run's last: the kernels just before wrote that of the rows between.
    """
    return isinstance(rows, AttentionRows)


def _block_dim(shape: AttentionShape) -> int:
    size: int = next_power_of_2(shape.head_dim)
    return max(64, size)


def _registers(config: HopperConfig, widens: bool, block_dim: int) -> dict[str, int]:
    """Warps that widen float8, and registers of threads: on average, of those and of the loader.

    Where registers are short, two warps have room beside the one that loads, or four that have 40.
    Products of heads of 256 do not compile for the average of those.
    """
    most = config.max_registers
    warps, load, own = 0, 24, 24
    if widens and config.warp_groups == 2 and block_dim < 256:
        most, warps, load, own = 128, 4, 40, 40
    elif widens and (config.warp_groups == 2 or most <= 128):
        warps, load, own = 2, 72, 72
    elif widens:
        most, warps, own = min(most, 160), 4, 72
    return {
        "maxnreg": most, "WIDEN_WARPS": warps, "LOAD_REGISTERS": load, "WIDEN_REGISTERS": own,
    }  # fmt: skip


def _launch(
    q: Tensor,
    shape: AttentionShape,
    rows: QueryRows,
    kv: LayerKV,
    sinks: Tensor | None,
    out: Tensor,
    arrived: Tensor,
    group: RunGroup,
    config: HopperConfig,
) -> None:
    assert rows.runs is not None
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    table = rows.block_table
    scale = shape.scale * LOG2_E
    max_seq_len = table.shape[1] * kv.keys.shape[2]
    scratch = scratch_of(group, len(q), shape, max_seq_len, config)
    sums = q.new_empty(scratch.sums, dtype=torch.float32)
    box = min(kv.keys.shape[2], config.box)
    # 64 elements a line.
    described = (boxes(memory, box, 64 * memory.itemsize) for memory in (kv.keys, kv.values))
    where = (rows.positions, rows.slots, rows.runs.starts, table)
    inputs = (q, *described, *where, sinks, kv.k_scales, kv.v_scales)
    widens = kv.keys.dtype == FLOAT8
    constants = {
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": heads_per_kv,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_DIM": _block_dim(shape),
        "BLOCK_SIZE": kv.keys.shape[2],
        "TILE": config.tile,
        "WINDOW": shape.sliding_window or 0,
        "SLOTS": config.slots,
        "num_warps": 4,
        **_registers(config, widens, _block_dim(shape)),
        **pdl_options(q, early=reads_earlier_passes(rows)),
    }
    if config.warp_groups:
        tile = QUERIES // heads_per_kv * config.warp_groups
        num_tiles = most_tiles(group.num_runs, group.max_rows, len(q), tile)
        rows_kernel[num_tiles, shape.num_kv_heads](
            *inputs, out, sums, group.first, group.max_rows, group.num_runs, table.stride(0), scale,
            WARP_GROUPS=config.warp_groups,
            PAIR_REGISTERS=216 if widens else 240,
            BLOCK_RUNS=block_runs(table, group),
            **constants,
        )  # fmt: skip
        return
    tiles_per_run = cdiv(group.max_rows, (config.columns or QUERIES) // heads_per_kv)
    num_tiles = group.num_runs * tiles_per_run
    assert num_tiles <= MAX_TILES
    assert num_tiles * shape.num_kv_heads <= len(arrived)
    stats = q.new_empty(scratch.stats, dtype=torch.float32)
    splits_kernel[(config.programs,)](
        *inputs, out, sums, stats, arrived, group.first, group.max_rows, tiles_per_run, num_tiles,
        table.stride(0), max_splits(max_seq_len), scale,
        COLUMNS=config.columns, BLOCK_TILES=FEW_TILES if num_tiles <= FEW_TILES else MAX_TILES,
        **constants,
    )  # fmt: skip

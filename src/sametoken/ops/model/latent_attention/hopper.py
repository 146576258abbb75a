"""Latent attention on Hopper GPUs: which launches it serves, their choice, and the launch.

``rows_kernel`` computes all splits of a query tile in one program. Where query tiles are too few
to fill the chip, ``splits_kernel`` spreads splits over programs and ``join_kernel`` joins them.
All share one arithmetic, so a row has the same bits. On other chips the kernels of ``triton``
serve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sametoken.ops.backend import AttentionRows, RunGroup
from sametoken.ops.model.attention.hopper import is_hopper
from sametoken.ops.model.attention.schedule import max_splits
from sametoken.ops.model.attention.tuning import LOG2_E, MAX_PARTIAL_BYTES
from sametoken.ops.model.latent_attention.hopper_kernels import (
    join_kernel,
    rows_kernel,
    splits_kernel,
)
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.pdl import pdl_options

RANK, WIDTH = 512, 576

#: Programs that run at once: one a multiprocessor.
MULTIPROCESSORS = 132

#: Multiprocessors that programs of whole rows have to keep busy, over all their rounds. Below, it
#: is faster to share splits evenly and to join them, which costs about a fifth.
BUSY_PROGRAMS = 100

#: Most query tiles of a launch of splits: each program looks at all of them.
MAX_TILES = 1024


@dataclass(frozen=True, slots=True)
class LatentHopperConfig:
    """Sizes of a launch, none of which affects bits.

    Attributes:
        queries: rows x heads of a query tile: 16, 32 or 64.
        slots: tiles of 64 vectors that shared memory holds.
        num_warps: that multiply: 4 or 8.
        max_registers: per thread, on average over warps.
        programs: of a launch of splits; 0: a program computes whole rows.
    """

    queries: int
    slots: int
    num_warps: int
    max_registers: int
    programs: int


#: Splits that a program of ``join_kernel`` loads at once. Without a number of registers the
#: compiler moves each load to its use, to save some, and every load waits for the one before it.
JOIN_SIZES = {"AHEAD": 8, "num_warps": 4, "maxnreg": 80}

#: By queries of a tile, as tuned by benchmarks/kernels/latent_attention_gpu.py.
CONFIGS = {
    16: LatentHopperConfig(16, 2, 4, 128, 128),
    32: LatentHopperConfig(32, 2, 8, 168, 128),
    64: LatentHopperConfig(64, 2, 8, 168, 128),
}


def serves(
    rank: int, width: int, dtype: torch.dtype, block_size: int, device: torch.device
) -> bool:
    """Whether these kernels compute this attention: always or never in an engine."""
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and (rank, width) == (RANK, WIDTH)
        and block_size in (16, 32, 64, 128)
    )


def choose(
    num_runs: int, width: int, num_rows: int, num_heads: int, max_seq_len: int
) -> LatentHopperConfig:
    """The configuration of a launch of ``num_runs`` runs of at most ``width`` rows.

    ``num_rows`` limits the rows of all runs together.
    """
    queries = min(max(16, triton.next_power_of_2(width * num_heads)), 64)
    config = CONFIGS[queries]
    tiles = num_runs * triton.cdiv(width * num_heads, queries)
    partial_bytes = 4 * num_runs * width * num_heads * RANK * max_splits(max_seq_len)
    fits = tiles <= MAX_TILES and partial_bytes <= MAX_PARTIAL_BYTES
    programs = most_tiles(num_runs, width, num_rows, num_heads, queries)
    few = programs < BUSY_PROGRAMS * triton.cdiv(programs, MULTIPROCESSORS)
    if fits and (few or width * num_heads <= queries):
        return config
    return replace(config, programs=0)


def most_tiles(num_runs: int, width: int, num_rows: int, num_heads: int, queries: int) -> int:
    """Most tiles of ``queries`` queries that runs have, each with a last tile of its own."""
    of_rows = (num_rows * num_heads + num_runs * (queries - 1)) // queries
    return min(num_runs * -(-width * num_heads // queries), of_rows)


def attention(
    q: Tensor,
    scale: float,
    rows: AttentionRows,
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
        memory: the layer's vectors, contiguous, finite in their first 512 elements.
        config: the configuration of all launches; None: ``choose``.
    """
    assert rows.runs is not None
    assert q.shape[2] == memory.vectors.shape[2] == WIDTH
    assert q.is_contiguous()
    assert memory.vectors.is_contiguous()
    out = q.new_empty(*q.shape[:2], RANK)
    max_seq_len = rows.block_table.shape[1] * memory.vectors.shape[1]
    for group in rows.runs.groups if len(q) else ():
        chosen = config or choose(group.num_runs, group.max_rows, len(q), q.shape[1], max_seq_len)
        _launch(q, scale * LOG2_E, rows, memory, out, group, chosen)
    return out


def _launch(
    q: Tensor,
    scale: float,
    rows: AttentionRows,
    memory: LayerLatent,
    out: Tensor,
    group: RunGroup,
    config: LatentHopperConfig,
) -> None:
    assert rows.runs is not None
    heads, table, starts = q.shape[1], rows.block_table, rows.runs.starts
    inputs = (q, _boxes(memory.vectors), rows.positions, rows.slots, starts, table)
    constants = {
        "HEADS": heads,
        "QUERIES": config.queries,
        "BLOCK_SIZE": memory.vectors.shape[1],
        "SLOTS": config.slots,
        "WARPS": config.num_warps,
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers,
        **pdl_options(q),
    }
    if not config.programs:
        tiles = most_tiles(group.num_runs, group.max_rows, len(q), heads, config.queries)
        running = q.new_empty(tiles * config.queries * RANK, dtype=torch.float32)
        rows_kernel[(tiles,)](
            *inputs, running, out, group.first, group.max_rows, group.num_runs, table.stride(0),
            scale, BLOCK_RUNS=max(128, triton.next_power_of_2(group.num_runs)), **constants,
        )  # fmt: skip
        return
    tiles_per_run = triton.cdiv(group.max_rows * heads, config.queries)
    num_tiles = group.num_runs * tiles_per_run
    most = max_splits(table.shape[1] * memory.vectors.shape[1])
    parts = (group.num_runs * group.max_rows, heads, most)
    sums = q.new_empty(prod(parts) * RANK, dtype=torch.float32)
    stats = q.new_empty(prod(parts) * 2, dtype=torch.float32)
    splits_kernel[(config.programs,)](
        *inputs, sums, stats, group.first, group.max_rows, tiles_per_run, num_tiles,
        table.stride(0), most, scale,
        BLOCK_TILES=256 if num_tiles <= 256 else MAX_TILES, **constants,
    )  # fmt: skip
    join_kernel[parts[:2]](
        sums, stats, rows.positions, rows.slots, starts, out, group.first, group.max_rows, most,
        scale, HEADS=heads, **JOIN_SIZES, **pdl_options(q),
    )  # fmt: skip


def _boxes(memory: Tensor) -> TensorDescriptor:
    """What one TMA load reads of vectors: at most 64 positions x 64 elements of one block."""
    lines = memory.view(-1, memory.shape[-1])
    assert len(lines) < 2**31
    box = [min(memory.shape[1], 64), 64]
    dtype = gl.float16 if memory.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor.from_tensor(
        lines, box, gl.NVMMASharedLayout.get_default_for(box, dtype)
    )

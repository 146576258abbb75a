"""Launch configurations of attention, and the choice by shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from sametoken.ops.backend import AttentionShape
from sametoken.ops.launch_sizes import cdiv, next_power_of_2

LOG2_E = 1.4426950408889634

#: Positions per split: part of a row's arithmetic, so one constant for the whole engine.
SPLIT = 128

#: Shared memory of programs of 64 queries over heads of 128 where no matrix unit takes bf16, which
#: is more than GPUs of compute capability 7.5 have.
_WIDE_MEMORY = 80 << 10

#: Most bytes of partial results of a launch; above it splits run sequentially.
MAX_PARTIAL_BYTES = 1 << 29

#: One program runs all splits of a query tile in sequence, or several do and a second launch merges
#: (split-KV, flash decoding).
Form = Literal["sequential", "split_kv"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """A launch configuration. Only ``split`` and ``tile`` affect a row's bits.

    Attributes:
        form: one program per query tile, or split-KV.
        block_queries: rows x query heads per program, a power of two from 16.
        num_warps: warps per program.
        num_stages: depth of the load pipeline. Odd where an iteration needs several blocks, since
            block table and KV then share it.
        split: positions per split, a multiple of ``tile``.
        tile: positions per loop iteration.
        kv_left: KV, not the queries, is the left operand of the matrix products, so that few
            queries fill the tensor cores of a whole warp group.
        programs: number of programs that split-KV aims at.
    """

    form: Form
    block_queries: int
    num_warps: int
    num_stages: int
    split: int = SPLIT
    tile: int = 64
    kv_left: bool = True
    programs: int = 528


#: Configurations by the least number of programs (query tiles x KV heads) of a launch.
ByPrograms = tuple[tuple[int, AttentionConfig], ...]


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Configurations of all launches over heads of one size.

    Attributes:
        tile: positions per loop iteration: it affects bits, so one for all launches.
        split_kv: for 16 queries per program, with split-KV.
        sequential: for 16 queries per program, without. Launches with as many programs as its
            first entry fill the chip and run their splits sequentially.
        wide: for longer runs, in either form.
        prefill: for the longest runs. Query tiles are no larger, unless one row's heads are.
    """

    tile: int
    split_kv: ByPrograms
    sequential: ByPrograms
    wide: AttentionConfig
    prefill: AttentionConfig

    @property
    def busy_programs(self) -> int:
        """Number of programs that fills the chip."""
        return self.sequential[0][0]


def by_programs(configs: ByPrograms, programs: int) -> AttentionConfig:
    """The last configuration that a launch has enough programs for, or the first."""
    fitting = [config for least, config in configs if programs >= least]
    return fitting[-1] if fitting else configs[0][1]


#: As tuned by decode_gpu.py and attention_gpu.py of benchmarks/kernels. In prefill the queries
#: fill a warp group.
SMALL_HEADS = LaunchTable(
    tile=64,
    split_kv=(
        (1, AttentionConfig("split_kv", 16, num_warps=4, num_stages=3)),
        # Several programs share a multiprocessor's shared memory.
        (64, AttentionConfig("split_kv", 16, num_warps=4, num_stages=2)),
    ),
    sequential=(
        (132, AttentionConfig("sequential", 16, num_warps=4, num_stages=3)),
        (396, AttentionConfig("sequential", 16, num_warps=2, num_stages=2)),
    ),
    wide=AttentionConfig("sequential", 32, num_warps=4, num_stages=3),
    prefill=AttentionConfig("sequential", 64, num_warps=4, num_stages=2, kv_left=False),
)
#: With a larger tile only one program would fit a multiprocessor.
LARGE_HEADS = LaunchTable(
    tile=32,
    split_kv=((1, AttentionConfig("split_kv", 16, num_warps=4, num_stages=3)),),
    sequential=((132, AttentionConfig("sequential", 16, num_warps=4, num_stages=3)),),
    wide=AttentionConfig("sequential", 32, num_warps=4, num_stages=3),
    prefill=AttentionConfig("sequential", 32, num_warps=4, num_stages=3),
)
#: fp32 products do not use tensor cores: small query tiles only.
_FP32_SEQUENTIAL = AttentionConfig("sequential", 16, num_warps=4, num_stages=2)
FP32_HEADS = LaunchTable(
    tile=64,
    split_kv=((1, replace(_FP32_SEQUENTIAL, form="split_kv")),),
    sequential=((264, _FP32_SEQUENTIAL),),
    wide=_FP32_SEQUENTIAL,
    prefill=_FP32_SEQUENTIAL,
)
#: Tiles of 64 would take 148 KiB of shared memory, of which some GPUs have 99.
FP32_LARGE_HEADS = replace(FP32_HEADS, tile=32)

#: Not tuned. Two running results of 512 x 32 fill the registers of 8 warps, and one program's
#: queries and two tiles of keys and values 130 KB of a multiprocessor's 227.
_HUGE = AttentionConfig("sequential", 32, num_warps=8, num_stages=2, programs=264)
_HUGE_FEW = replace(_HUGE, block_queries=16)
HUGE_HEADS = LaunchTable(
    tile=32,
    split_kv=((1, replace(_HUGE_FEW, form="split_kv")),),
    sequential=((132, _HUGE_FEW),),
    wide=_HUGE,
    prefill=_HUGE,
)
_FP32_HUGE = replace(_HUGE_FEW, num_stages=1)
FP32_HUGE_HEADS = LaunchTable(
    tile=16,
    split_kv=((1, replace(_FP32_HUGE, form="split_kv")),),
    sequential=((132, _FP32_HUGE),),
    wide=_FP32_HUGE,
    prefill=_FP32_HUGE,
)


def table_for(shape: AttentionShape, dtype: torch.dtype) -> LaunchTable:
    """The launch table for heads of this size and dtype."""
    size = next_power_of_2(shape.head_dim)
    if dtype.itemsize == 4:
        if size <= 128:
            return FP32_HEADS
        return FP32_LARGE_HEADS if size == 256 else FP32_HUGE_HEADS
    if size <= 128:
        return SMALL_HEADS
    return LARGE_HEADS if size == 256 else HUGE_HEADS


def choose(
    num_runs: int, width: int, shape: AttentionShape, max_seq_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """The configuration of a launch of runs of at most ``width`` rows."""
    table = table_for(shape, dtype)
    group = shape.num_heads // shape.num_kv_heads
    queries = min(table.prefill.block_queries, next_power_of_2(width * group))
    queries = max(16, next_power_of_2(group), queries)
    programs = num_runs * cdiv(width, queries // group) * shape.num_kv_heads
    busy = programs >= table.busy_programs
    partial_bytes = 4 * num_runs * width * shape.q_size * cdiv(max_seq_len, SPLIT)
    fits = partial_bytes <= MAX_PARTIAL_BYTES
    form: Form = "split_kv" if not busy and max_seq_len > SPLIT and fits else "sequential"
    if queries == 16:
        configs = table.split_kv if form == "split_kv" else table.sequential
        config = by_programs(configs, programs)
    else:
        config = table.wide if queries <= table.wide.block_queries else table.prefill
    return replace(config, form=form, block_queries=queries, tile=table.tile)


def fitted(config: AttentionConfig, group: int, memory: int) -> AttentionConfig:
    """The configuration, with fewer queries where a program has little shared ``memory``.

    Args:
        config: of a launch.
        group: query heads of a key-value head, all of which a program computes.
        memory: bytes of shared memory of a program.
    """
    if memory >= _WIDE_MEMORY:
        return config
    return replace(config, block_queries=min(config.block_queries, max(32, next_power_of_2(group))))

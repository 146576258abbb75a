"""Launch configurations of ``triton`` for latent attention, the choice by shapes, and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sametoken.ops.backend import RunGroup
from sametoken.ops.hopper import MULTIPROCESSORS
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.schedule import max_splits
from sametoken.ops.model.attention.scratch import Launches, Scratch, most_bytes, of_splits
from sametoken.ops.model.attention.tuning import MAX_PARTIAL_BYTES, Form
from sametoken.ops.model.latent_attention.shape import LatentShape


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """A launch configuration. Only ``tile`` affects a row's bits, so each dtype has one.

    Attributes:
        form: one program per query tile, or split-KV.
        block_queries: rows x heads per program, a power of two from 16.
        tile: positions per loop iteration; divides every split.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        kv_left: vectors, not the queries, are the left operand of the matrix products, so that few
            queries fill the tensor cores of a whole warp group.
        programs: number of programs that split-KV aims at.
    """

    form: Form
    block_queries: int
    tile: int
    num_warps: int
    num_stages: int
    kv_left: bool = False
    programs: int = 2 * MULTIPROCESSORS


#: Over 576-wide vectors of 16 bits; a program takes 117 KiB of shared memory, with 16 queries 98.
_HALF = LatentConfig("split_kv", 32, tile=64, num_warps=4, num_stages=2, kv_left=True)
_HALF_MEMORY = 117 << 10
#: fp32 products do not use tensor cores: small tiles only.
_FULL = LatentConfig("split_kv", 16, tile=16, num_warps=4, num_stages=1)


def heads_per_tile(num_heads: int, block_queries: int) -> int:
    """How many heads of a row a query tile has: the most that divide them."""
    return max(n for n in range(1, block_queries + 1) if num_heads % n == 0)


def choose(
    num_runs: int, width: int, num_heads: int, max_seq_len: int, dtype: torch.dtype
) -> LatentConfig:
    """The configuration of a launch of runs of at most ``width`` rows over latents of 512."""
    widest = _FULL if dtype.itemsize == 4 else _HALF
    group = heads_per_tile(num_heads, widest.block_queries)
    queries = min(widest.block_queries, next_power_of_2(width * group))
    queries = max(16, queries)
    tiles = num_runs * cdiv(width, queries // group) * (num_heads // group)
    splits = max_splits(max_seq_len)
    fits = 4 * num_runs * width * num_heads * splits * 512 <= MAX_PARTIAL_BYTES
    form: Form = "split_kv" if tiles < MULTIPROCESSORS and splits > 1 and fits else "sequential"
    return replace(widest, form=form, block_queries=queries)


def fitted(config: LatentConfig, memory: int) -> LatentConfig:
    """The configuration, with 16 queries where a program has less shared ``memory``."""
    return config if memory >= _HALF_MEMORY else replace(config, block_queries=16)


def scratch_of(
    group: RunGroup, num_rows: int, sizes: tuple[int, int], max_seq_len: int, config: LatentConfig
) -> Scratch:
    """Memory of a launch beside its result; ``sizes`` are the heads and the rank."""
    num_heads, rank = sizes
    if config.form == "sequential":
        return Scratch(num_rows * num_heads * rank)
    num_places = group.num_runs * group.max_rows
    return of_splits(num_places, num_heads, max_splits(max_seq_len), rank)


def most_scratch(shape: LatentShape, dtype: torch.dtype, launches: Launches) -> int:
    """The most bytes of ``scratch_of`` in an engine."""
    max_seq_len, sizes = launches.max_seq_len, (shape.num_heads, shape.rank)

    def of_launch(num_runs: int, width: int, num_rows: int) -> Scratch:
        config = choose(num_runs, width, shape.num_heads, max_seq_len, dtype)
        return scratch_of(RunGroup(0, num_runs, width), num_rows, sizes, max_seq_len, config)

    place = of_splits(1, shape.num_heads, max_splits(max_seq_len), shape.rank)
    return most_bytes(of_launch, place, launches)

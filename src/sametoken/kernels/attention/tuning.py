"""How an attention launch is cut up: what there is to choose, and the choice by shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from sametoken.kernels.interface import AttentionShape

#: Positions per split: part of a row's arithmetic, so one constant for the whole engine.
SPLIT = 128

#: Programs that keep the chip busy, two per multiprocessor; from there on rows walk.
BUSY_PROGRAMS = 264

#: Bytes of partial results that a launch may need at most; beyond, rows walk.
MAX_PARTIAL_BYTES = 1 << 29

#: Query tiles x KV heads that the joined form has counters for.
MAX_JOINED = 1 << 14

#: Who merges the splits of a query tile: its one program, a second launch, or of the programs
#: that took a split each, the last one.
Form = Literal["walk", "spread", "joined"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How a launch is cut up. Only ``split`` and ``tile`` take part in a row's bits.

    Attributes:
        form: who walks and who merges the splits.
        block_queries: rows x query heads per program, a power of two from 16.
        num_warps: warps per program.
        num_stages: depth of the load pipeline. It is odd where a loop turn needs several
            blocks, for block table and KV then share it.
        split: positions per split, a multiple of ``tile``.
        tile: positions per loop turn.
        kv_left: KV is the left operand of the matrix products, so that few queries fill the
            matrix unit of a whole warp group; otherwise the queries are.
        programs: programs to aim at where splits are spread.
    """

    form: Form
    block_queries: int
    num_warps: int
    num_stages: int
    split: int = SPLIT
    tile: int = 64
    kv_left: bool = True
    programs: int = 2 * BUSY_PROGRAMS

    def num_tiles(self, num_rows: int, window: int, group: int) -> int:
        """Query tiles of a launch."""
        tiles: int = triton.cdiv(window, self.block_queries // group)
        return num_rows // window * tiles

    def num_lanes(self, tiles_and_heads: int, max_splits: int) -> int:
        """Programs that share the splits of a query tile."""
        lanes: int = triton.cdiv(self.programs, tiles_and_heads)
        return min(max_splits, lanes)


#: Cuts by kind of launch, for 16 queries a program, as benchmarks/decode_gpu.py chose them.
FEW = AttentionConfig("joined", 16, num_warps=4, num_stages=3)
MANY = AttentionConfig("walk", 16, num_warps=2, num_stages=2)
#: More queries than 16 a program: long windows and prefill.
WIDE = AttentionConfig("walk", 32, num_warps=4, num_stages=3)

#: Bytes of a head's row in memory above which tiles fill shared memory: a shallow pipeline.
HEAVY_ROW = 256


def choose(
    num_rows: int, shape: AttentionShape, window: int | None, max_seq_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """How to cut up a launch of at least one row, from its shapes."""
    group = shape.num_heads // shape.num_kv_heads
    width = window or num_rows
    half = dtype.itemsize == 2
    largest = WIDE.block_queries if half else 16
    queries = min(largest, triton.next_power_of_2(width * group))
    queries = max(16, triton.next_power_of_2(group), queries)
    tiles = num_rows // width * triton.cdiv(width, queries // group)
    busy = tiles * shape.num_kv_heads >= BUSY_PROGRAMS
    partial_bytes = 4 * num_rows * shape.q_size * triton.cdiv(max_seq_len, SPLIT)
    fits = partial_bytes <= MAX_PARTIAL_BYTES
    heavy = triton.next_power_of_2(shape.head_dim) * dtype.itemsize > HEAVY_ROW
    if window is not None and not busy and max_seq_len > SPLIT and fits:
        cut = FEW
    else:
        # Walking programs fill the chip by themselves: small tiles do with half the warps.
        cut = MANY if queries == 16 and half and not heavy else WIDE
    return replace(cut, block_queries=queries, num_stages=2 if heavy else cut.num_stages)

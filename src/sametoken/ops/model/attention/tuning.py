"""How an attention launch is cut up: what there is to choose, and the choice by shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from sametoken.ops.backend import AttentionShape

#: Positions per split: part of a row's arithmetic, so one constant for the whole engine.
SPLIT = 128

#: Bytes of partial results that a launch may need at most; beyond, rows walk.
MAX_PARTIAL_BYTES = 1 << 29

#: Who merges the splits of a query tile: its one program as it walks, or a second launch.
Form = Literal["walk", "spread"]


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
    programs: int = 528

    def num_tiles(self, num_runs: int, width: int, group: int) -> int:
        """Query tiles of a launch, for runs of ``width`` rows."""
        tiles: int = triton.cdiv(width, self.block_queries // group)
        return num_runs * tiles

    def num_lanes(self, tiles_and_heads: int, max_splits: int) -> int:
        """Programs that share the splits of a query tile."""
        lanes: int = triton.cdiv(self.programs, tiles_and_heads)
        return min(max_splits, lanes)


#: Cuts by the least number of programs (query tiles x KV heads) that a launch must have for them.
ByPrograms = tuple[tuple[int, AttentionConfig], ...]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cuts of all launches over heads of one size.

    Attributes:
        tile: positions per loop turn: part of the bits, so one for all launches.
        few: for 16 queries a program, where splits are spread.
        many: likewise, where rows walk. So many programs as its first cut wants keep the chip
            busy: from there on rows walk.
        wide: for longer runs, in either form.
        prefill: for the longest. No query tile is larger, unless one row's heads are.
    """

    tile: int
    few: ByPrograms
    many: ByPrograms
    wide: AttentionConfig
    prefill: AttentionConfig

    @property
    def busy_programs(self) -> int:
        """Programs that keep the chip busy."""
        return self.many[0][0]


def by_programs(cuts: ByPrograms, programs: int) -> AttentionConfig:
    """The last cut that a launch has the programs for, or the first."""
    fitting = [cut for least, cut in cuts if programs >= least]
    return fitting[-1] if fitting else cuts[0][1]


#: Cuts as decode_gpu.py and attention_gpu.py of benchmarks/kernels chose them. In prefill the
#: queries fill a warp group.
LIGHT = Cuts(
    tile=64,
    few=(
        (1, AttentionConfig("spread", 16, num_warps=4, num_stages=3)),
        # Several programs share a multiprocessor's memory.
        (64, AttentionConfig("spread", 16, num_warps=4, num_stages=2)),
    ),
    many=(
        (132, AttentionConfig("walk", 16, num_warps=4, num_stages=3)),
        (396, AttentionConfig("walk", 16, num_warps=2, num_stages=2)),
    ),
    wide=AttentionConfig("walk", 32, num_warps=4, num_stages=3),
    prefill=AttentionConfig("walk", 64, num_warps=4, num_stages=2, kv_left=False),
)
#: With a larger tile only one program would fit a multiprocessor.
HEAVY = Cuts(
    tile=32,
    few=((1, AttentionConfig("spread", 16, num_warps=4, num_stages=3)),),
    many=((132, AttentionConfig("walk", 16, num_warps=4, num_stages=3)),),
    wide=AttentionConfig("walk", 32, num_warps=4, num_stages=3),
    prefill=AttentionConfig("walk", 32, num_warps=4, num_stages=3),
)
#: fp32, which no matrix unit multiplies: small query tiles only.
_FP32_WALK = AttentionConfig("walk", 16, num_warps=4, num_stages=2)
FP32 = Cuts(
    tile=64,
    few=((1, replace(_FP32_WALK, form="spread")),),
    many=((264, _FP32_WALK),),
    wide=_FP32_WALK,
    prefill=_FP32_WALK,
)

#: Elements of a head from which on it is heavy.
HEAVY_HEAD = 256


def cuts_for(shape: AttentionShape, dtype: torch.dtype) -> Cuts:
    """The cuts of heads of this size and type."""
    if dtype.itemsize == 4:
        return FP32
    return HEAVY if triton.next_power_of_2(shape.head_dim) >= HEAVY_HEAD else LIGHT


def choose(
    num_runs: int, width: int, shape: AttentionShape, max_seq_len: int, dtype: torch.dtype
) -> AttentionConfig:
    """How to cut up a launch of runs of at most ``width`` rows, from its shapes."""
    cuts = cuts_for(shape, dtype)
    group = shape.num_heads // shape.num_kv_heads
    queries = min(cuts.prefill.block_queries, triton.next_power_of_2(width * group))
    queries = max(16, triton.next_power_of_2(group), queries)
    programs = num_runs * triton.cdiv(width, queries // group) * shape.num_kv_heads
    busy = programs >= cuts.busy_programs
    partial_bytes = 4 * num_runs * width * shape.q_size * triton.cdiv(max_seq_len, SPLIT)
    fits = partial_bytes <= MAX_PARTIAL_BYTES
    form: Form = "spread" if not busy and max_seq_len > SPLIT and fits else "walk"
    if queries == 16:
        cut = by_programs(cuts.few if form == "spread" else cuts.many, programs)
    else:
        cut = cuts.wide if queries <= cuts.wide.block_queries else cuts.prefill
    return replace(cut, form=form, block_queries=queries, tile=cuts.tile)

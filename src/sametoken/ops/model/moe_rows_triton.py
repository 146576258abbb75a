"""The rows of a mixture of experts in Triton: grouped by expert, and their outputs added."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

#: Pairs of a segment: more are counted by segment first.
_SEGMENT = 1024
#: Of several segments, experts of a program, and the bits in which it counts the pairs of each.
_EXPERTS, _BITS = 4, 16
_COLUMNS = 1024
#: The most pairs of an expert, in the mean, of which each is a group of its own: hardly two choose
#: one expert then, and those that do read its weights from L2.
_LONE_PAIRS = 0.125


@dataclass(frozen=True, slots=True)
class RowGroups:
    """(row, choice) pairs grouped by expert.

    Attributes:
        experts: [E] int32, all experts; those that a row chose come first.
        counts: [E] int32, pairs of each of ``experts``.
        starts: [E] int32, pairs of those before it: where its rows begin, if those of all experts
            lie one after the other.
        members: [E, pairs] int32, by id: an expert's pairs in order, at the beginning of its row.
    """

    experts: Tensor
    counts: Tensor
    starts: Tensor
    members: Tensor

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> RowGroups:
        """Group [T, top_k] int64 choices below ``num_experts``; T is at least 1."""
        pairs = chosen.numel()
        block = min(next_power_of_2(pairs), _SEGMENT)
        segments = cdiv(pairs, block)
        each = 1 if segments == 1 else _EXPERTS
        width = max(next_power_of_2(num_experts), each)
        sizes = (num_experts,), (num_experts,), (num_experts,), (num_experts, pairs)
        parts = [torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes]
        options = {"E_BLOCK": width, "BLOCK": block, "num_warps": 4, **pdl_options(chosen)}
        counted = None
        if segments > 1:
            counted = parts[0].new_empty(segments, width)
            _count_kernel[(segments,)](chosen, counted, pairs, **options)
        _group_kernel[(cdiv(num_experts, each), segments)](
            chosen,
            counted,
            *parts,
            pairs,
            NUM_EXPERTS=num_experts,
            EXPERTS=each,
            BITS=_BITS,
            **options,
        )
        return cls(*parts)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """All, as kernels of experts take them."""
        return self.experts, self.counts, self.starts, self.members

    @property
    def pairs(self) -> int:
        """T * top_k."""
        return self.members.shape[1]

    @property
    def mean_rows(self) -> float:
        """Pairs of an expert, if all have equally many."""
        return self.pairs / len(self.members)

    @property
    def most_chosen(self) -> int:
        """The most experts that rows can have chosen."""
        return min(self.members.shape)


@dataclass(frozen=True, slots=True)
class LonePairs:
    """(row, choice) pairs, each a group of its own.

    Attributes:
        chosen: [T, top_k] int64.
        num_experts: E.
    """

    chosen: Tensor
    num_experts: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> LonePairs | None:
        """Those of choices; None where groups take less time."""
        return cls(chosen, num_experts) if chosen.numel() <= _LONE_PAIRS * num_experts else None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As of ``RowGroups``, like the next three."""
        return self.chosen, None, None, None

    @property
    def pairs(self) -> int:
        return self.chosen.numel()

    @property
    def mean_rows(self) -> float:
        return self.pairs / self.num_experts

    @property
    def most_chosen(self) -> int:
        return self.pairs


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of the experts' rows, which lie by expert: each has rows of one.

    Attributes:
        count: [1] int32, tiles.
        experts: [most] int32, the expert of each.
        firsts: [most] int32, its first row.
        ends: [most] int32, the row after its expert's last.
        order: [pairs] int32, the pair of each row.
    """

    count: Tensor
    experts: Tensor
    firsts: Tensor
    ends: Tensor
    order: Tensor

    @classmethod
    def of(cls, groups: RowGroups, rows: int) -> RowTiles:
        """Cut groups into tiles of up to ``rows`` rows."""
        num_experts, pairs = groups.members.shape
        most = groups.most_chosen + pairs // rows
        parts = [groups.counts.new_empty(size) for size in (1, most, most, most, pairs)]
        _tiles_kernel[(most,)](
            groups.experts,
            groups.counts,
            groups.starts,
            groups.members,
            *parts,
            pairs,
            NUM_EXPERTS=num_experts,
            E_BLOCK=next_power_of_2(num_experts),
            ROWS=rows,
            num_warps=4,
            **pdl_options(groups.counts),
        )
        return cls(*parts)


#: Adds to a product of each pair's row: of rows, results, groups, and the pairs of a row; 0 as for
#: rows that lie by expert, and results that do not.
AddToPairs = Callable[[Tensor, Tensor, RowGroups, int], None]


def combine(outputs: Tensor, weights: Tensor, out: Tensor, beside: Tensor | None = None) -> None:
    """Add each row's outputs by rank in fp32, each times its weight, into ``out``.

    Args:
        outputs: [T * top_k, H].
        weights: [T, top_k] fp32.
        out: [T, H], written.
        beside: of the shape and dtype of ``out``, contiguous, added to the rounded sums.
    """
    (num_rows, hidden), top_k = out.shape, weights.shape[1]
    if beside is not None:
        assert beside.is_contiguous()
        assert (beside.shape, beside.dtype) == (out.shape, out.dtype)
    _combine_kernel[(num_rows, cdiv(hidden, _COLUMNS))](
        outputs,
        weights,
        beside,
        out,
        TOP_K=top_k,
        WIDTH=hidden,
        BLOCK=min(next_power_of_2(hidden), _COLUMNS),
        num_warps=4,
        **pdl_options(out),
    )


#: The number of pairs makes no other kernel.
_jit_over_pairs = triton.jit(do_not_specialize=["num_pairs"])


@triton.jit
def _segment_of(chosen, segment, num_pairs, BLOCK: tl.constexpr):
    """Pairs of a segment, whether they exist, and their experts."""
    pair = segment * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    return pair, inside, tl.load(chosen + pair, inside, other=0).to(tl.int32)


@_jit_over_pairs
def _count_kernel(
    chosen,  # [num_pairs]
    counted,  # [segments, E_BLOCK], written: pairs of a segment by expert
    num_pairs,
    E_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    segment = tl.program_id(0)
    _, inside, found = _segment_of(chosen, segment, num_pairs, BLOCK)
    own = counted + segment * E_BLOCK + tl.arange(0, E_BLOCK)
    tl.store(own, tl.histogram(found, E_BLOCK, mask=inside))


@triton.jit
def _count_before(counted, segment, expert, E_BLOCK: tl.constexpr):
    """Pairs of an expert in the segments before one."""
    SEGMENTS: tl.constexpr = 64
    count = 0
    for first in range(0, segment, SEGMENTS):
        other = first + tl.arange(0, SEGMENTS)
        count += tl.sum(tl.load(counted + other * E_BLOCK + expert, other < segment, other=0), 0)
    return count


@triton.jit
def _count_all(counted, num_segments, E_BLOCK: tl.constexpr):
    """[E_BLOCK] pairs of all experts."""
    SEGMENTS: tl.constexpr = 16
    counts = tl.zeros([E_BLOCK], tl.int32)
    for first in range(0, num_segments, SEGMENTS):
        other = first + tl.arange(0, SEGMENTS)[:, None]
        at = counted + other * E_BLOCK + tl.arange(0, E_BLOCK)[None, :]
        counts += tl.sum(tl.load(at, other < num_segments, other=0), 0)
    return counts


@_jit_over_pairs
def _group_kernel(
    chosen,  # [num_pairs]
    counted,  # as of ``_count_kernel``; None: there is one segment
    experts,  # [E], written
    counts,  # [E], written
    starts,  # [E], written
    members,  # [E, num_pairs], written
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Collect the (row, choice) pairs of some experts in one segment, in order."""
    gdc_launch_and_wait(PDL)
    first, segment = tl.program_id(0) * EXPERTS, tl.program_id(1)
    pair, inside, found = _segment_of(chosen, segment, num_pairs, BLOCK)
    which = found - first
    mine = inside & (which >= 0) & (which < EXPERTS)
    # One scan counts for all, each in its own bits.
    shift = tl.where(mine, BITS * which, 0).to(tl.int64)
    counted_here = tl.cumsum(mine.to(tl.int64) << shift, axis=0) >> shift
    place = (counted_here & ((1 << BITS) - 1)).to(tl.int32) - 1
    if counted is not None:
        for own in tl.static_range(EXPERTS):
            before = _count_before(counted, segment, first + own, E_BLOCK)
            place += tl.where(which == own, before, 0)
    tl.store(members + found.to(tl.int64) * num_pairs + place, pair, mine)
    if segment == 0:
        if counted is None:
            pairs_of = tl.histogram(found, E_BLOCK, mask=inside)
        else:
            pairs_of = _count_all(counted, tl.num_programs(1), E_BLOCK)
        ids = tl.arange(0, E_BLOCK)
        is_chosen = ((pairs_of > 0) & (ids < NUM_EXPERTS)).to(tl.int32)
        for own in tl.static_range(EXPERTS):
            expert = first + own
            count = tl.sum(tl.where(ids == expert, pairs_of, 0), axis=0)
            rank = tl.sum(tl.where(ids < expert, is_chosen, 0), axis=0)
            if count == 0:
                rank = tl.sum(is_chosen, axis=0) + expert - rank
            tl.store(experts + rank, expert, expert < NUM_EXPERTS)
            tl.store(counts + rank, count, expert < NUM_EXPERTS)
            start = tl.sum(tl.where(ids < expert, pairs_of, 0), axis=0)
            tl.store(starts + rank, start, expert < NUM_EXPERTS)


@_jit_over_pairs
def _tiles_kernel(
    experts,  # [E], as are the next two those of ``RowGroups``
    counts,
    starts,
    members,  # [E, num_pairs]
    count,  # [1], written
    tile_experts,  # [most], written
    firsts,  # [most], written
    ends,  # [most], written
    order,  # [num_pairs], written
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find one tile; the last programs may have none."""
    gdc_launch_and_wait(PDL)
    tile = tl.program_id(0)
    rank = tl.arange(0, E_BLOCK)
    tiles = tl.cdiv(tl.load(counts + rank, rank < NUM_EXPERTS, other=0), ROWS)
    following = tl.cumsum(tiles, 0)
    if tile == 0:
        tl.store(count, tl.sum(tiles, 0))
    own = tl.sum((following <= tile).to(tl.int32), 0)
    if own < NUM_EXPERTS:
        before = tl.max(tl.where(following <= tile, following, 0), 0)
        expert, start = tl.load(experts + own), tl.load(starts + own)
        end = start + tl.load(counts + own)
        first = start + (tile - before) * ROWS
        tl.store(tile_experts + tile, expert)
        tl.store(firsts + tile, first)
        tl.store(ends + tile, end)
        row = first + tl.arange(0, ROWS)
        pair = tl.load(members + expert.to(tl.int64) * num_pairs + row - start, row < end, other=0)
        tl.store(order + row, pair, row < end)


@triton.jit
def group_at(
    place,
    experts,  # ``tensors`` of ``RowGroups`` or ``LonePairs``, as are the next two
    counts,
    starts,
):
    """A group's expert, the number of its rows, and where they begin."""
    expert, count, start = tl.load(experts + place).to(tl.int64), 1, place
    if counts is not None:
        count, start = tl.load(counts + place), tl.load(starts + place)
    return expert, count, start


@triton.jit
def pairs_at(member, is_pair, start, members):
    """The pairs of members of a group, and the rows of those that lie by expert."""
    place = start + member
    pair = place
    if members is not None:
        pair = tl.load(members + member, is_pair, other=0)
    return pair.to(tl.int64), place.to(tl.int64)


@triton.jit
def _combine_kernel(
    outputs,  # [T, TOP_K, WIDTH]
    weights,  # [T, TOP_K]
    beside,  # [T, WIDTH], or None
    out,  # [T, WIDTH], written
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        at = outputs + (row * TOP_K + rank) * WIDTH + column
        value = tl.load(at, column < WIDTH, other=0.0).to(tl.float32)
        total += tl.load(weights + row * TOP_K + rank) * value
    total = total.to(out.dtype.element_ty)
    if beside is not None:
        other = tl.load(beside + row * WIDTH + column, column < WIDTH, other=0.0)
        total = (total.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, total, column < WIDTH)

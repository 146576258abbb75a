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

_GROUP_BLOCK = 4096
_COLUMNS = 1024


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
        block = min(next_power_of_2(pairs), _GROUP_BLOCK)
        sizes = (num_experts,), (num_experts,), (num_experts,), (num_experts, pairs)
        parts = [torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes]
        _group_kernel[(num_experts,)](
            chosen,
            *parts,
            pairs,
            NUM_EXPERTS=num_experts,
            E_BLOCK=next_power_of_2(num_experts),
            BLOCK=block,
            num_warps=4 if block <= 1024 else 8,
            **pdl_options(chosen),
        )
        return cls(*parts)

    @property
    def mean_rows(self) -> float:
        """Pairs of an expert, if all have equally many."""
        num_experts, pairs = self.members.shape
        return pairs / num_experts

    @property
    def most_chosen(self) -> int:
        """The most experts that rows can have chosen."""
        return min(self.members.shape)


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


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    chosen,  # [num_pairs]
    experts,  # [E], written
    counts,  # [E], written
    starts,  # [E], written
    members,  # [E, num_pairs], written
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Collect the (row, choice) pairs of one expert, in order."""
    gdc_launch_and_wait(PDL)
    expert = tl.program_id(0)
    members += expert.to(tl.int64) * num_pairs
    count = 0
    pairs_of = tl.zeros([E_BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        found = tl.load(chosen + pair, inside, other=0).to(tl.int32)
        mine = (inside & (found == expert)).to(tl.int32)
        place = count + tl.cumsum(mine, axis=0) - 1
        tl.store(members + place, pair, mine > 0)
        count += tl.sum(mine, axis=0)
        pairs_of += tl.histogram(found, E_BLOCK, mask=inside)
    ids = tl.arange(0, E_BLOCK)
    is_chosen = ((pairs_of > 0) & (ids < NUM_EXPERTS)).to(tl.int32)
    rank = tl.sum(tl.where(ids < expert, is_chosen, 0), axis=0)
    if count == 0:
        rank = tl.sum(is_chosen, axis=0) + expert - rank
    tl.store(experts + rank, expert)
    tl.store(counts + rank, count)
    tl.store(starts + rank, tl.sum(tl.where(ids < expert, pairs_of, 0), axis=0))


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

"""Low-rank adapters beside experts in Triton: two launches beside each of their two products.

A program takes 16 of an expert's pairs at a time and one adapter, and stores the pairs whose rows
chose it. A tile has 16 rows whatever their number and is summed over features in order, so a pair's
bits are those that it has alone.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.low_rank import Factors, Room, RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertFactors, ExpertSizes
from sametoken.ops.model.low_rank_triton import StackedRoom
from sametoken.ops.model.moe_rows_triton import RowGroups
from sametoken.ops.model.moe_triton import StackedExperts, moe_forward
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_ROWS = 16
#: Programs for each tile of an expert's mean rows, as routers have favourites; one for few rows.
_PROGRAMS, _FEW = 4, 2
#: Features of a tile of the second factor.
_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class StackedPairUpdates(StackedRoom):
    """What A adapters add to one product of E experts, the second axis of all factors."""

    @property
    def pair_bytes(self) -> int:
        """Of what is between the factors."""
        return self.down.shape[2] * self.down.itemsize

    def prepare(self, factors: Sequence[Sequence[Factors | None]]) -> Callable[[int], None]:
        """As ``Update.prepare``: the parts of each expert."""
        # On the host, so that all experts' come to the device at once.
        made = [torch.zeros_like(one[0], device="cpu") for one in self.places]
        for expert, parts in enumerate(factors):
            self.fill([one[expert] for one in made], parts)
        return self.writing([own.to(self.down.device) for own in made])

    def add(
        self, numbers: Tensor, top_k: int, x: Tensor, out: Tensor, groups: RowGroups, gather: int
    ) -> None:
        """Add to each pair's result what its row's adapter adds.

        Args:
            numbers: [T] int64, the place of each row's adapter; 0: it has none.
            top_k: pairs of a row.
            x, out, groups, gather: as for ``AddToPairs``.
        """
        assert x.is_contiguous()
        assert out.is_contiguous()
        num_adapters, num_experts, width, in_features = self.down.shape
        out_features, rank = self.up.shape[2:]
        # Pairs whose adapter has no factors stay undefined, and are not read.
        middle = x.new_empty(out.shape[0], width)
        mean = int(groups.mean_rows)
        shares = _PROGRAMS * cdiv(mean, _ROWS) if mean > _FEW else 1
        block, blocks = min(triton.next_power_of_2(width), 64), cdiv(max(self.sizes), _COLUMNS)
        pairs = groups.experts, groups.counts, groups.starts, groups.members, out.shape[0]
        _down_kernel[(cdiv(width, block) * num_adapters, shares, groups.most_chosen)](
            *(x, numbers, self.down, middle, *pairs),
            TOP_K=top_k,
            GATHER=gather > 0,
            EXPERTS=num_experts,
            WIDTH=width,
            IN_FEATURES=in_features,
            ROWS=_ROWS,
            BLOCK=block,
            BLOCK_K=128,
            num_warps=4,
            **pdl_options(x),
        )
        parts = len(self.sizes)
        _up_kernel[(blocks * parts * num_adapters, shares, groups.most_chosen)](
            *(middle, numbers, self.up, self.scale, self.borders, out, *pairs),
            TOP_K=top_k,
            GATHER=gather > 0,
            EXPERTS=num_experts,
            OUT_FEATURES=out_features,
            PARTS=parts,
            RANK=rank,
            BLOCKS=blocks,
            ROWS=_ROWS,
            BLOCK=_COLUMNS,
            num_warps=4,
            **pdl_options(out),
        )


@dataclass(frozen=True, slots=True)
class AdaptedStackedExperts:
    """``AdaptedExperts`` of a GPU.

    Attributes:
        experts: the checkpoint's.
        inputs, output: what adapters add to the first product and to the second.
        rows: the adapter of each row of the pass.
    """

    experts: StackedExperts
    inputs: StackedPairUpdates
    output: StackedPairUpdates
    rows: RowAdapters

    @classmethod
    def of(cls, experts: StackedExperts, sizes: ExpertSizes, room: Room, rows: RowAdapters) -> Self:
        """See ``Packing.adapt_experts``."""
        inner = experts.down.in_features
        first = StackedPairUpdates.of(sizes.hidden, sizes.inputs, room, sizes.num_experts)
        second = StackedPairUpdates.of(inner, (sizes.hidden,), room, sizes.num_experts)
        return cls(experts, first, second, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the experts and of the adapters."""
        return self.experts.nbytes + self.inputs.nbytes + self.output.nbytes

    @property
    def pair_bytes(self) -> int:
        """See ``AdaptedExperts``."""
        return max(self.inputs.pair_bytes, self.output.pair_bytes)

    def prepare(self, factors: Sequence[ExpertFactors]) -> Callable[[int], None]:
        """See ``AdaptedExperts``."""
        first = self.inputs.prepare([one.inputs for one in factors])
        second = self.output.prepare([[one.output] for one in factors])

        def write(place: int) -> None:
            first(place)
            second(place)

        return write

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """See ``moe_forward``."""
        numbers, top_k = self.rows.of(x).numbers, chosen.shape[1]

        updates = (
            partial(self.inputs.add, numbers, top_k),
            partial(self.output.add, numbers, top_k),
        )
        return moe_forward(x, self.experts, chosen, weights, out_dtype, beside, updates)


@triton.jit
def _own_pairs(members, member, count, numbers, adapter, TOP_K: tl.constexpr):
    """An expert's pairs at these places, and whether the row of each chose the adapter."""
    is_pair = member < count
    pair = tl.load(members + member, is_pair, other=0).to(tl.int64)
    return pair, tl.load(numbers + pair // TOP_K, is_pair, other=0) == adapter + 1


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    x,  # [rows, IN_FEATURES]; see GATHER
    numbers,  # [T] int64
    down,  # [A, EXPERTS, WIDTH, IN_FEATURES]
    middle,  # [num_pairs, WIDTH]
    experts,  # ``RowGroups``, as are the next three
    counts,
    starts,
    members,
    num_pairs,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,  # x has a row for each TOP_K pairs; else pairs' rows lie by expert
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    group = tl.program_id(2)
    expert = tl.load(experts + group).to(tl.int64)
    count, start = tl.load(counts + group), tl.load(starts + group)
    num_blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    adapter = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    down += ((adapter * EXPERTS + expert) * WIDTH + columns[None, :]) * IN_FEATURES
    step = tl.num_programs(1) * ROWS
    for first in range(tl.program_id(1) * ROWS, count, step):
        member = first + tl.arange(0, ROWS)
        pair, own = _own_pairs(members + expert * num_pairs, member, count, numbers, adapter, TOP_K)
        if tl.max(own.to(tl.int32), axis=0) > 0:
            row = pair // TOP_K if GATHER else (start + member).to(tl.int64)
            x_rows = x + row[:, None] * IN_FEATURES
            total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
            for k in range(0, IN_FEATURES, BLOCK_K):
                features = k + tl.arange(0, BLOCK_K)
                known = features < IN_FEATURES
                left = tl.load(x_rows + features[None, :], own[:, None] & known[None, :], other=0.0)
                both = known[:, None] & inside[None, :]
                right = tl.load(down + features[:, None], both, other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            place = middle + pair[:, None] * WIDTH + columns[None, :]
            tl.store(place, total.to(middle.dtype.element_ty), own[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _up_kernel(
    middle,  # [num_pairs, PARTS * RANK]
    numbers,  # [T] int64
    up,  # [A, EXPERTS, OUT_FEATURES, RANK]
    scales,  # [A, EXPERTS, PARTS] fp32
    borders,  # [PARTS + 1] int32
    out,  # [num_pairs, OUT_FEATURES]; see GATHER
    experts,  # ``RowGroups``, as are the next three
    counts,
    starts,
    members,
    num_pairs,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,  # results lie by expert; else in the order of pairs
    EXPERTS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    group = tl.program_id(2)
    expert = tl.load(experts + group).to(tl.int64)
    count, start = tl.load(counts + group), tl.load(starts + group)
    part = tl.program_id(0) // BLOCKS % PARTS
    adapter = (tl.program_id(0) // (BLOCKS * PARTS)).to(tl.int64)
    matrix = adapter * EXPERTS + expert
    scale = tl.load(scales + matrix * PARTS + part)
    if scale == 0.0:
        return
    features = tl.load(borders + part) + tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = features < tl.load(borders + part + 1)
    ranks = tl.arange(0, RANK)
    factors = up + (matrix * OUT_FEATURES + features[None, :]) * RANK + ranks[:, None]
    right = tl.load(factors, inside[None, :], other=0.0)
    step = tl.num_programs(1) * ROWS
    for first in range(tl.program_id(1) * ROWS, count, step):
        member = first + tl.arange(0, ROWS)
        pair, own = _own_pairs(members + expert * num_pairs, member, count, numbers, adapter, TOP_K)
        if tl.max(own.to(tl.int32), axis=0) > 0:
            at = middle + pair[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
            added = tl.dot(tl.load(at, own[:, None], other=0.0), right, input_precision="ieee")
            stored = own[:, None] & inside[None, :]
            row = (start + member).to(tl.int64) if GATHER else pair
            place = out + row[:, None] * OUT_FEATURES + features[None, :]
            total = tl.load(place, stored, other=0.0).to(tl.float32) + scale * added
            tl.store(place, total.to(out.dtype.element_ty), stored)

"""Low-rank adapters in Triton: two launches beside a product, whatever its rows choose.

A program takes 16 rows and one adapter, and stores the rows that chose it. A tile has 16 rows
whatever their number, so the tensor cores add a row in one order.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.low_rank import Chosen, Factors, Room
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_ROWS = 16
#: Rows from which a program of the second launch takes several tiles, and how many.
_MANY_ROWS, _TILES = 512, 4
#: Features whose products are added up first, and how many such sums are added up next, both in
#: order; then their sums are. A program of the first launch ends with the first kind for few rows,
#: with the second for many; the second launch adds the rest.
_SPLIT, _GROUP = 256, 4
#: The least rank of a tensor core's tile.
_MIN_RANK = 16


@dataclass(frozen=True, slots=True)
class StackedRoom:
    """Room for A adapters in one tensor for each factor, with S parts of rank at most R.

    Attributes:
        down: [A, S * R, K]; rows of zeros after a part's own rank.
        up: [A, N, R]; columns of zeros likewise.
        scale: [A, S] fp32; 0 where an adapter has no factors.
        borders: [S + 1] int32, the first output feature of each part, and N.
        sizes: output features of the parts.
    """

    down: Tensor
    up: Tensor
    scale: Tensor
    borders: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, in_features: int, sizes: Sequence[int], room: Room, *matrices: int) -> Self:
        """Room beside a matrix of ``in_features``, or many: a further axis after A for each number.

        See ``Packing.adapt``.
        """
        borders, shape = [0, *accumulate(sizes)], (room.count, *matrices)
        rank = triton.next_power_of_2(max(_MIN_RANK, room.rank))

        def zeros(*more: int, dtype: torch.dtype = room.dtype) -> Tensor:
            return torch.zeros(*shape, *more, dtype=dtype, device=room.device)

        return cls(
            zeros(len(sizes) * rank, in_features),
            zeros(borders[-1], rank),
            zeros(len(sizes), dtype=torch.float32),
            torch.tensor(borders, dtype=torch.int32, device=room.device),
            tuple(sizes),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, zeros included."""
        return self.down.nbytes + self.up.nbytes

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is written of an adapter."""
        return self.down, self.up, self.scale

    def fill(self, own: Sequence[Tensor], parts: Sequence[Factors | None]) -> None:
        """Write the factors of a matrix's parts to zeros, of the shapes of ``places`` behind A."""
        down, up, scale = own
        by_part = zip(down.chunk(len(parts)), up.split(self.sizes), parts, strict=True)
        for part, (own_down, own_up, one) in enumerate(by_part):
            if one is not None:
                own_down[: one.rank] = one.down
                own_up[:, : one.rank] = one.up
                scale[part] = one.scale

    def writing(self, made: Sequence[Tensor]) -> Callable[[int], None]:
        """What writes to a place, from 1 on, what ``fill`` has made."""

        def write(place: int) -> None:
            for all_of_them, own in zip(self.places, made, strict=True):
                all_of_them[place - 1].copy_(own)

        return write


@dataclass(frozen=True, slots=True)
class StackedUpdates(StackedRoom):
    """``Update`` of A adapters beside one matrix."""

    def prepare(self, parts: Sequence[Factors | None]) -> Callable[[int], None]:
        """See ``Update``."""
        made = [torch.zeros_like(one[0]) for one in self.places]
        self.fill(made, parts)
        return self.writing(made)

    @property
    def row_bytes(self) -> int:
        """See ``Update``: of the sums between the launches."""
        _, width, in_features = self.down.shape
        return cdiv(in_features, _SPLIT) * width * torch.float32.itemsize

    def begin(self, x: Tensor, chosen: Chosen) -> Callable[[Tensor], None]:
        """See ``Update``."""
        x = x.contiguous()
        num_rows, in_features = x.shape
        num_adapters, width, _ = self.down.shape
        group = _GROUP if num_rows >= _MANY_ROWS else 1
        num_sums = cdiv(in_features, _SPLIT * group)
        # Rows whose adapter has no factors stay undefined, and are not read.
        sums = torch.empty(num_sums, num_rows, width, dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(width), 64)
        if num_rows:
            _down_kernel[(cdiv(num_rows, _ROWS), cdiv(width, block) * num_sums, num_adapters)](
                *(x, chosen.numbers, self.down, sums, num_rows),
                WIDTH=width,
                IN_FEATURES=in_features,
                SPLIT=_SPLIT,
                GROUP=group,
                ROWS=_ROWS,
                BLOCK=block,
                BLOCK_K=128,
                num_warps=4,
                **pdl_options(x),
            )
        return partial(self._add, sums, chosen)

    def _add(self, sums: Tensor, chosen: Chosen, out: Tensor) -> None:
        assert out.is_contiguous()
        num_sums, num_rows, width = sums.shape
        num_adapters, out_features, rank = self.up.shape
        columns = 128
        tiles, group = (_TILES, 1) if num_rows >= _MANY_ROWS else (1, _GROUP)
        blocks = cdiv(max(self.sizes), columns)
        if num_rows:
            _up_kernel[(cdiv(num_rows, _ROWS * tiles), blocks * (width // rank), num_adapters)](
                *(sums, chosen.numbers, self.up, self.scale, self.borders, out, num_rows),
                OUT_FEATURES=out_features,
                PARTS=width // rank,
                RANK=rank,
                SUMS=num_sums,
                GROUP=group,
                BLOCKS=blocks,
                TILES=tiles,
                ROWS=_ROWS,
                BLOCK=columns,
                num_warps=4,
                **pdl_options(out),
            )


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    x,  # [num_rows, IN_FEATURES]
    chosen,  # [num_rows] int64
    down,  # [A, WIDTH, IN_FEATURES]
    sums,  # [ceil(IN_FEATURES / (SPLIT * GROUP)), num_rows, WIDTH] fp32
    num_rows,
    WIDTH: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    adapter = tl.program_id(2).to(tl.int64)
    own = tl.load(chosen + rows, rows < num_rows, other=0) == adapter + 1
    if tl.max(own.to(tl.int32), axis=0) == 0:
        return
    num_blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    columns = tl.program_id(1) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) // num_blocks
    inside = columns < WIDTH
    x_rows = x + rows[:, None].to(tl.int64) * IN_FEATURES
    down_rows = down + (adapter * WIDTH + columns[None, :]) * IN_FEATURES
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for split in range(group * GROUP, group * GROUP + GROUP):
        added = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for first in range(split * SPLIT, min(split * SPLIT + SPLIT, IN_FEATURES), BLOCK_K):
            features = first + tl.arange(0, BLOCK_K)
            known = features < IN_FEATURES
            left = tl.load(x_rows + features[None, :], own[:, None] & known[None, :], other=0.0)
            both = known[:, None] & inside[None, :]
            right = tl.load(down_rows + features[:, None], both, other=0.0)
            added = tl.dot(left, right, added, input_precision="ieee")
        total += added
    place = (group * num_rows + rows[:, None]).to(tl.int64) * WIDTH + columns[None, :]
    tl.store(sums + place, total, own[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _up_kernel(
    sums,  # [SUMS, num_rows, PARTS * RANK] fp32
    chosen,  # [num_rows] int64
    up,  # [A, OUT_FEATURES, RANK]
    scales,  # [A, PARTS] fp32
    borders,  # [PARTS + 1] int32
    out,  # [num_rows, OUT_FEATURES]
    num_rows,
    OUT_FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SUMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    first = tl.program_id(0) * (ROWS * TILES)
    adapter = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1) // BLOCKS
    scale = tl.load(scales + adapter * PARTS + part)
    all_rows = first + tl.arange(0, ROWS * TILES)
    some = tl.load(chosen + all_rows, all_rows < num_rows, other=0) == adapter + 1
    if tl.max((some & (scale != 0.0)).to(tl.int32), axis=0) == 0:
        return
    features = tl.load(borders + part) + tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = features < tl.load(borders + part + 1)
    ranks = tl.arange(0, RANK)
    factors = up + (adapter * OUT_FEATURES + features[None, :]) * RANK + ranks[:, None]
    right = tl.load(factors, inside[None, :], other=0.0)
    for tile in range(TILES):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        own = tl.load(chosen + rows, rows < num_rows, other=0) == adapter + 1
        at = sums + rows[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + ranks[None, :]
        left = tl.zeros([ROWS, RANK], dtype=tl.float32)
        for begin in range(0, SUMS, GROUP):
            group = tl.zeros([ROWS, RANK], dtype=tl.float32)
            for member in tl.static_range(GROUP):
                group += tl.load(at, own[:, None] & (begin + member < SUMS), other=0.0)
                at += num_rows * (PARTS * RANK)
            left += group
        added = tl.dot(left.to(right.dtype), right, input_precision="ieee")
        stored = own[:, None] & inside[None, :]
        place = out + rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
        total = tl.load(place, stored, other=0.0).to(tl.float32) + scale * added
        tl.store(place, total.to(out.dtype.element_ty), stored)

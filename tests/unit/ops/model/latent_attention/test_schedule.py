"""The splits in Triton are those of ``attention.schedule``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sametoken.ops.model.attention.schedule import LEVELS, max_splits
from sametoken.ops.model.latent_attention.schedule import begin_of, split_of


@triton.jit
def _kernel(positions, splits, begins, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    split = split_of(tl.load(positions + at))
    tl.store(splits + at, split)
    tl.store(begins + at, begin_of(split))


def test_every_position_lies_in_the_split_that_the_levels_say():
    borders = [begin for begin, _ in LEVELS]
    near = [border + step for border in (*borders, 256, 1536, 5120, 36864) for step in (-1, 0, 1)]
    positions = torch.tensor(sorted({max(0, one) for one in near} | set(range(7, 70_000, 1663))))
    positions = torch.nn.functional.pad(positions, (0, 128 - len(positions))).int()
    splits, begins = torch.empty_like(positions), torch.empty_like(positions)
    _kernel[(1,)](positions, splits, begins, COUNT=128)
    for position, split, begin in zip(
        positions.tolist(), splits.tolist(), begins.tolist(), strict=True
    ):
        first, size = max(level for level in LEVELS if level[0] <= position)
        assert begin == first + (position - first) // size * size
        assert split == max_splits(position + 1) - 1

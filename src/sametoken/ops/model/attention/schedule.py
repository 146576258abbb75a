"""The splits of a row's KV on Hopper: a schedule of position alone, shared by every launch form.

Splits are short near position 0, where one request has to fill the chip, and long beyond, where
every split costs a merge. Kernels in Gluon call Triton's functions too.
"""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

#: First position and split size of each level, in which the next level begins at a border.
LEVELS = ((0, 256), (1024, 512), (4096, 1024), (32768, 4096))


@cache
def max_splits(max_seq_len: int) -> int:
    """The most splits of a row below ``max_seq_len``."""
    ends = (*(begin for begin, _ in LEVELS[1:]), max_seq_len)
    sizes = (
        (max(0, min(end, max_seq_len) - begin), size)
        for (begin, size), end in zip(LEVELS, ends, strict=True)
    )
    return sum(-(-length // size) for length, size in sizes)


_BEGIN_1 = tl.constexpr(LEVELS[1][0])
_BEGIN_2 = tl.constexpr(LEVELS[2][0])
_BEGIN_3 = tl.constexpr(LEVELS[3][0])
_SIZE_0 = tl.constexpr(LEVELS[0][1])
_SIZE_1 = tl.constexpr(LEVELS[1][1])
_SIZE_2 = tl.constexpr(LEVELS[2][1])
_SIZE_3 = tl.constexpr(LEVELS[3][1])
# The first split of each level.
_FIRST_1 = tl.constexpr(max_splits(LEVELS[1][0]))
_FIRST_2 = tl.constexpr(max_splits(LEVELS[2][0]))
_FIRST_3 = tl.constexpr(max_splits(LEVELS[3][0]))


@triton.jit
def split_of(position):
    """The split that holds a position."""
    return (
        tl.minimum(position, _BEGIN_1) // _SIZE_0
        + (tl.minimum(tl.maximum(position, _BEGIN_1), _BEGIN_2) - _BEGIN_1) // _SIZE_1
        + (tl.minimum(tl.maximum(position, _BEGIN_2), _BEGIN_3) - _BEGIN_2) // _SIZE_2
        + (tl.maximum(position, _BEGIN_3) - _BEGIN_3) // _SIZE_3
    )


@triton.jit
def begin_of(split):
    """The first position of a split."""
    return (
        tl.minimum(split, _FIRST_1) * _SIZE_0
        + (tl.minimum(tl.maximum(split, _FIRST_1), _FIRST_2) - _FIRST_1) * _SIZE_1
        + (tl.minimum(tl.maximum(split, _FIRST_2), _FIRST_3) - _FIRST_2) * _SIZE_2
        + (tl.maximum(split, _FIRST_3) - _FIRST_3) * _SIZE_3
    )


@triton.jit
def splits_before(position, PARTS: tl.constexpr = 1):
    """How many splits begin before a position; with two PARTS, have their middle before it."""
    FROM_0: tl.constexpr = _SIZE_0 // PARTS - 1
    FROM_1: tl.constexpr = _SIZE_1 // PARTS - 1
    FROM_2: tl.constexpr = _SIZE_2 // PARTS - 1
    FROM_3: tl.constexpr = _SIZE_3 // PARTS - 1
    return (
        (tl.minimum(position, _BEGIN_1) + FROM_0) // _SIZE_0
        + (tl.minimum(tl.maximum(position, _BEGIN_1), _BEGIN_2) - _BEGIN_1 + FROM_1) // _SIZE_1
        + (tl.minimum(tl.maximum(position, _BEGIN_2), _BEGIN_3) - _BEGIN_2 + FROM_2) // _SIZE_2
        + (tl.maximum(position, _BEGIN_3) - _BEGIN_3 + FROM_3) // _SIZE_3
    )


@triton.jit
def own_part(low, high, first, end, TILE: tl.constexpr):
    """Of a query tile's splits, from ``first`` to KV tile ``end``, those in ``low .. high - 1``.

    A split belongs where its middle does, so a part is cut at the border nearest to each of its
    ends: one that begins just before a border would otherwise have a split more than its share.

    Returns:
        The first of them, the split after their last, and the split after the query tile's last.
    """
    after = splits_before(end * TILE)
    last = tl.where(high < end, splits_before(high * TILE, 2), after)
    return tl.maximum(first, splits_before(low * TILE, 2)), last, after

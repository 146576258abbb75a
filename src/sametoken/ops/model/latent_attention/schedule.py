"""The splits of a row's vectors: ``attention.schedule`` for kernels in Triton."""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.attention.schedule import LEVELS, max_splits

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

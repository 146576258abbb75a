"""Products of many rows in slices, which bounds their memory and changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from sametoken.ops.weight import Normed

#: Rows of a slice. Steps of fewer rows run whole.
SLICE_ROWS = 8192

_Rows = TypeVar("_Rows", Tensor, Normed)


def in_slices(run: Callable[[_Rows], Tensor], x: _Rows) -> Tensor:
    """``run(x)`` for a function of single rows, [T, ...] -> [T, N], a slice of rows at a time.

    Only the result and what one slice needs are in memory at once. Every product is batch
    invariant, so rows have the bits that they have in one call.
    """
    if x.shape[0] <= SLICE_ROWS:
        return run(x)
    out = None
    for first in range(0, x.shape[0], SLICE_ROWS):
        part = run(x[first : first + SLICE_ROWS])
        out = part.new_empty(x.shape[0], part.shape[1]) if out is None else out
        out[first : first + part.shape[0]] = part
    assert out is not None
    return out

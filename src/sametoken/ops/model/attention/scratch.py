"""Memory that launches of attention need beside their results, and the most that any has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sametoken.ops.model.attention.tuning import MAX_PARTIAL_BYTES

_FP32 = 4


class Scratch(NamedTuple):
    """Elements in fp32 of a launch's memory.

    Attributes:
        sums: weighted values: partial results by split, or running ones that no register holds.
        stats: the total weights and maximum scores of partial results.
    """

    sums: int
    stats: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return _FP32 * (self.sums + self.stats)


def of_splits(num_places: int, num_heads: int, num_splits: int, dim: int) -> Scratch:
    """Of a launch of splits, which stores a result of each for every place of a row."""
    parts = num_places * num_heads * num_splits
    return Scratch(parts * dim, parts * 2)


class Runs(NamedTuple):
    """Runs of a launch: how many, and from how many rows to how many the longest has."""

    num_runs: int
    least_rows: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class Launches:
    """An engine's launches of attention.

    Attributes:
        runs: of all launches, those of padding included.
        max_rows: the most rows of a pass.
        max_seq_len: positions that a request has room for.
    """

    runs: tuple[Runs, ...]
    max_rows: int
    max_seq_len: int


def most_bytes(
    scratch_of: Callable[[int, int, int], Scratch], place: Scratch, launches: Launches
) -> int:
    """The most bytes of a launch.

    Args:
        scratch_of: of a launch, by its runs, the rows of the longest and the rows of all.
        place: of one row in a launch of splits.
        launches: all that there are.
    """
    most = 0
    for num_runs, least, widest in launches.runs:
        # One of whole rows has the more the more rows there are.
        most = max(most, scratch_of(num_runs, widest, launches.max_rows).nbytes)
        fitting = MAX_PARTIAL_BYTES // (_FP32 * place.sums * num_runs)
        for width in range(min(widest, fitting), least - 1, -1):
            if num_runs * width * place.nbytes <= most:
                break
            # Other runs may be padding: of fewer rows in all more launches are of splits.
            most = max(most, scratch_of(num_runs, width, width).nbytes)
    return most

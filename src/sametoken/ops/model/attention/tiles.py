"""Query tiles of launches over runs: how many programs there are."""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.backend import RunGroup
from sametoken.ops.launch_sizes import cdiv, next_power_of_2


def most_tiles(num_runs: int, width: int, num_rows: int, tile: int) -> int:
    """Most tiles of ``tile`` rows that runs have, each with a last tile of its own.

    ``width`` limits the rows of a run, ``num_rows`` those of all. If heads lie side by side in a
    tile, all three count queries.
    """
    return min(num_runs * cdiv(width, tile), (num_rows + num_runs * (tile - 1)) // tile)


def block_runs(table: Tensor, group: RunGroup) -> int:
    """Runs that a program looks at: in an engine one number, whatever the step, for one kernel."""
    size: int = next_power_of_2(max(len(table) - 1, group.num_runs))
    return max(128, size)

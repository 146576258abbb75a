"""Long runs of recurrent layers on Hopper GPUs: where the walks in Gluon serve, and their grid."""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.recurrent.runs import Runs


def serves(runs: Runs, prepared: Tensor) -> bool:
    """Whether a pass has long runs, and prepared rows that can be copied by 16 bytes."""
    has_long = runs.are_long and runs.rows.num_short < runs.rows.count
    return has_long and prepared.shape[1] % 4 == 0 and is_hopper(prepared.device)


def grid(runs: Runs, num_rows: int, tiles: int) -> tuple[int, int]:
    """Programs for each tile of the states: as many as runs of a pass of ``num_rows`` rows, or two.

    Runs share programs beyond about as many as fill the GPU: padding has runs without rows.
    """
    long = runs.rows.count - runs.rows.num_short
    return tiles, min(long, max(2, num_rows // runs.rows.max_rows))

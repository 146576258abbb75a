"""``StepOps`` with data-dependent shapes, for a CPU: no dead rows are run.

The reference, except that rows are laid out for the drafts that exist, and a drafter runs live rows
only. It cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sametoken.ops.step import reference
from sametoken.ops.step.reference import (
    advanced,
    commit,
    deliver,
    fetch,
    live_rows,
    prepare_inputs,
    publish,
    stacked,
    verify,
    write_tables,
)
from sametoken.ops.step.types import CatchUp, Sequences, StepInputs

__all__ = [
    "advanced",
    "catch_up",
    "commit",
    "deliver",
    "fetch",
    "known_drafts",
    "prepare_inputs",
    "publish",
    "stacked",
    "verify",
    "write_tables",
]


def known_drafts(sequences: Sequences, slots: Sequence[int]) -> list[int]:
    """See ``StepOps.known_drafts``."""
    drafts = sequences.num_drafts.tolist()
    return [drafts[slot] for slot in slots]


def catch_up(sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool) -> CatchUp:
    """See ``StepOps.catch_up``; only live rows, and chains of requests that sample."""
    found = reference.catch_up(sequences, x, end, with_newest=with_newest)
    return live_rows(found, x.samples, sequences.reserved_slot)

"""``StepOps`` with data-dependent shapes, for a CPU: no dead rows are run.

The reference, except that rows are laid out for the drafts that exist, a drafter runs live rows
only, and windows are verified one by one on the host. It cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.ops.sampling.sample import ID_MASK, NAN_RANK, NO_TOKEN_RANK
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
)
from sametoken.ops.step.types import (
    HAS_NAN,
    NO_TOKEN,
    SOUND,
    CatchUp,
    Chances,
    Sequences,
    StepInputs,
    VerifyResult,
)

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
]

_FAULTS = {NAN_RANK: HAS_NAN, NO_TOKEN_RANK: NO_TOKEN}


def known_drafts(sequences: Sequences, slots: Sequence[int]) -> list[int]:
    """See ``StepOps.known_drafts``."""
    drafts: list[int] = sequences.num_drafts[list(slots)].tolist()
    return drafts


def catch_up(sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool) -> CatchUp:
    """See ``StepOps.catch_up``; only live rows, and chains of requests that sample."""
    found = reference.catch_up(sequences, x, end, with_newest=with_newest)
    return live_rows(found, x.samples, sequences.reserved_slot)


def verify(keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
    """See ``StepOps.verify``; a few windows take a tenth of the time of tensors' operations."""
    if chances is not None:
        return reference.verify(keys, x, chances)
    best: list[int] = keys.amax(dim=1).tolist()
    tokens = [ID_MASK - (key & ID_MASK) for key in best]
    rows = tokens, x.sampled.token_ids.tolist(), [_FAULTS.get(key >> 32, SOUND) for key in best]
    starts, num_drafts = x.window_starts.tolist(), x.num_drafts.tolist()
    results = [
        _verified(*(column[start : start + drafts + 1] for column in rows))
        if samples
        else (0, 0, SOUND)
        for start, drafts, samples in zip(starts, num_drafts, x.samples.tolist(), strict=False)
    ]
    columns = torch.tensor(list(zip(*results, strict=True)))
    return VerifyResult(torch.tensor(tokens, dtype=torch.int64), *columns)


def _verified(chosen: list[int], own: list[int], faults: list[int]) -> tuple[int, int, int]:
    """Accepted drafts, next token and fault of one window.

    Args:
        chosen: the target's token of each row.
        own: each row's own token; that of row i + 1 is draft i.
        faults: of each row.
    """
    matches = 0
    while matches + 1 < len(own) and chosen[matches] == own[matches + 1]:
        if faults[matches + 1] == NO_TOKEN:
            break
        matches += 1
    fault = max(faults[: matches + 1])
    return (matches, chosen[matches], SOUND) if fault == SOUND else (0, 0, fault)

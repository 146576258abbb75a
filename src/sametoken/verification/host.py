"""Log-probabilities as users receive them, from results that have reached the host."""

from __future__ import annotations

from sametoken.core.outputs import Logprob, PositionLogprobs
from sametoken.verification.base import TokenLogprobs


def split_by_owner(
    logprobs: TokenLogprobs, num_rows: int
) -> list[tuple[PositionLogprobs, ...] | None]:
    """Positions of each plan row, in order; None for plan rows that own none.

    The chosen token comes first, then the best ones that were asked for.

    Args:
        logprobs: tensors (or arrays) in host memory.
        num_rows: B, plan rows of the step.
    """
    positions: list[list[PositionLogprobs]] = [[] for _ in range(num_rows)]
    columns = (
        logprobs.owner.tolist(),
        logprobs.chosen_ids.tolist(),
        logprobs.chosen_logprobs.tolist(),
        logprobs.chosen_ranks.tolist(),
        logprobs.top_ids.tolist(),
        logprobs.top_logprobs.tolist(),
        logprobs.num_top.tolist(),
    )
    for owner, chosen, logprob, rank, top_ids, top_logprobs, num_top in zip(*columns, strict=True):
        entry: PositionLogprobs = {chosen: Logprob(logprob, rank)}
        for index in range(num_top):
            entry[top_ids[index]] = Logprob(top_logprobs[index], index + 1)
        positions[owner].append(entry)
    return [tuple(entries) or None for entries in positions]

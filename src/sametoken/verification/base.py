"""Log-probabilities between the device and the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Candidates of R positions, to be turned into ``PositionLogprobs`` by the host.

    Attributes:
        owner: [R] int64, the plan row of each position; ascending.
        chosen_ids, chosen_logprobs, chosen_ranks: [R] int64, fp32, int64 (rank from 1).
        top_ids, top_logprobs: [R, N] int64, fp32, best first; N is the most that any
            request of the step asked for.
        num_top: [R] int64, how many of the N the position's request asked for.
    """

    owner: Tensor
    chosen_ids: Tensor
    chosen_logprobs: Tensor
    chosen_ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    num_top: Tensor

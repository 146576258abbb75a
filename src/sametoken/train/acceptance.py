"""How many drafts in a row the target would accept, counted while training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.types.outputs import SpeculationMetrics


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts by draft position.

    Attributes:
        offered: [k] int64, rows whose drafts before this one were all accepted.
        accepted: [k] int64, rows of those whose draft is the target's token too.
    """

    offered: Tensor
    accepted: Tensor

    @classmethod
    def none(cls, k: int, device: torch.device) -> Acceptance:
        """No rows yet."""
        return cls(*(torch.zeros(k, dtype=torch.int64, device=device) for _ in range(2)))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.offered + other.offered, self.accepted + other.accepted)

    @property
    def conditional(self) -> tuple[float, ...]:
        """How often each draft is accepted if all before it were."""
        pairs = zip(self.accepted.tolist(), self.offered.tolist(), strict=True)
        return tuple(accepted / offered if offered else 0.0 for accepted, offered in pairs)

    @property
    def per_position(self) -> tuple[float, ...]:
        """How often each draft and all before it are accepted, as engines report it."""
        rates, product = [], 1.0
        for rate in self.conditional:
            product *= rate
            rates.append(product)
        return tuple(rates)

    @property
    def length(self) -> float:
        """Tokens per step with all drafts from an average row, the target's own token included."""
        return 1 + sum(self.per_position)


def count_accepted(correct: Tensor, goes_on: Tensor) -> tuple[Acceptance, Tensor]:
    """Count chains of drafts.

    Args:
        correct: [k, M] bool, whether the draft of each row is the target's token.
        goes_on: [k, M] bool, whether the text lets a chain reach each draft: the tokens that
            it was made from are those that the target would have emitted.

    Returns:
        The counts, and [M] int64, how many drafts of each row are accepted in a row.
    """
    reached = goes_on[0]
    offered, accepted, num_accepted = [], [], torch.zeros_like(reached, dtype=torch.int64)
    for draft in range(correct.shape[0]):
        reached = reached & goes_on[draft]
        offered.append(reached.sum())
        reached = reached & correct[draft]
        accepted.append(reached.sum())
        num_accepted = num_accepted + reached
    return Acceptance(torch.stack(offered), torch.stack(accepted)), num_accepted


def walk(num_accepted: list[int], counts: list[int], k: int) -> SpeculationMetrics:
    """What an engine counts if it drafts k tokens per step and emits the text's tokens.

    Args:
        num_accepted: accepted drafts by row. The first step of a sequence drafts from its
            first row, and the next one ``a + 1`` rows further. No step drafts past the
            sequence's end.
        counts: how many of the rows belong to each sequence, in order.
        k: drafts of a step.
    """
    windows, first = list[tuple[int, int]](), 0
    for count in counts:
        row = 0
        while row < count:
            num_drafts = min(k, count - row - 1)
            accepted = min(num_accepted[first + row], num_drafts)
            windows.append((num_drafts, accepted))
            row += accepted + 1
        first += count
    return SpeculationMetrics.of(windows)

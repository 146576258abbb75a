"""Draft limits per request, adapted to the load and to the request's recent acceptance.

A step takes about as long as what it reads whatever its rows, and computing its rows. If A rows are
computed in the time of these reads, a step of r rows takes the time of r + A. A draft is worth its
row if its probability of a token is at least the step's tokens by r + A: such drafts make the most
tokens a second. The limits change how much is computed, never which token is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Steps of up to this many rows take as long as a step of one row.
FREE_ROWS = 16

#: Prior of the acceptance rate, and its weight in verified drafts.
PRIOR_RATE = 0.8
PRIOR_WEIGHT = 1.0

#: Exponential decay of the counts per window.
DECAY = 0.9


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """Acceptance counts over the processed windows of one request.

    Without new drafts the rate decays to the prior, so that a request with a limit of 0 gets
    drafts again.

    Attributes:
        accepted: accepted drafts, exponentially decayed.
        verified: accepted drafts and the first rejected one of each window, decayed alike.
        proposes: whether the drafter had a draft for the newest processed window, offered or not.
    """

    accepted: float = 0.0
    verified: float = 0.0
    proposes: bool = True

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is accepted if all before it are; below 1."""
        return (PRIOR_RATE * PRIOR_WEIGHT + self.accepted) / (PRIOR_WEIGHT + self.verified)

    def chance(self, num_drafts: int) -> float:
        """Estimated probability that this number of drafts is accepted."""
        return self.rate**num_drafts

    def expected(self, num_drafts: int) -> float:
        """Estimated number of accepted drafts of a window with this number of them."""
        return self.rate * (1 - self.chance(num_drafts)) / (1 - self.rate)

    def limit(self, most: int, least_chance: float) -> int:
        """Drafts of the next window: as many of ``most`` as have this chance or more.

        Without a proposal in the newest window there are none.
        """
        if not self.proposes:
            return 0
        return min(most, int(math.log(least_chance) / math.log(self.rate)))

    def after(self, num_drafts: int, num_proposed: int, num_accepted: int) -> DraftRecord:
        """The record after one more window; counts are as in ``RequestResult``."""
        verified = num_accepted + (num_accepted < num_drafts)
        return DraftRecord(
            DECAY * self.accepted + num_accepted,
            DECAY * self.verified + verified,
            num_proposed > 0,
        )


@dataclass(frozen=True, slots=True)
class StepReads:
    """What a step reads whatever its rows: the weights, and caches of its decoding requests.

    Attributes:
        rows_per_weight_read: rows that the device computes while it reads the weights once.
        weights_bytes: of the target.
        kv_bytes: of a position, in the layers that see all of them.
        state_bytes: of a request's recurrent state.
    """

    rows_per_weight_read: int
    weights_bytes: int = 1
    kv_bytes: int = 0
    state_bytes: int = 0

    def rows(self, num_requests: int, num_positions: int) -> float:
        """Rows that are computed in the time of the reads.

        Args:
            num_requests: decoding requests of the step.
            num_positions: positions of all of them.
        """
        caches = num_positions * self.kv_bytes + num_requests * self.state_bytes
        return self.rows_per_weight_read * (1 + caches / self.weights_bytes)


def draft_limits(windows: Sequence[tuple[DraftRecord, int]], num_read_rows: float) -> list[int]:
    """Drafts of each window that are worth their rows.

    Args:
        windows: of each decoding request its record, and the most drafts that it may have.
        num_read_rows: rows that are computed in the time of what the step reads; infinite: as
            many more rows as there may be cost nothing.
    """
    if math.isinf(num_read_rows):
        return [most for _, most in windows]
    least = _least_chance(windows, num_read_rows)
    return [record.limit(most, least) for record, most in windows]


def _least_chance(windows: Sequence[tuple[DraftRecord, int]], num_read_rows: float) -> float:
    """Tokens by the time of a row in a step whose drafts are worth it beside single rows."""
    num_single = len(windows)
    single = num_single / (num_single + num_read_rows)
    drafts = [record.limit(most, single) for record, most in windows]
    accepted = sum(record.expected(n) for (record, _), n in zip(windows, drafts, strict=True))
    return (num_single + accepted) / (num_single + sum(drafts) + num_read_rows)

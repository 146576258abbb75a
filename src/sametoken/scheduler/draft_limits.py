"""Draft limits per request, adapted to the load and to the request's recent acceptance.

A step takes about as long as reading the weights plus computing its rows. If A rows are computed
in the time of that read, n decoding requests emit n tokens in the time of n + A rows. One more
row pays off if its probability of a token is at least n / (n + A). The limits change how much is
computed, never which token is emitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sametoken.scheduler.limits import SchedulerLimits

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

    def after(self, num_drafts: int, num_proposed: int, num_accepted: int) -> DraftRecord:
        """The record after one more window; counts are as in ``RequestResult``."""
        verified = num_accepted + (num_accepted < num_drafts)
        return DraftRecord(
            DECAY * self.accepted + num_accepted,
            DECAY * self.verified + verified,
            num_proposed > 0,
        )


def least_chance(num_decoding: int, rows_per_weight_read: int) -> float:
    """The chance of acceptance from which a draft is worth its row."""
    return num_decoding / (num_decoding + rows_per_weight_read)


class DraftLimits(Protocol):
    """The policy that limits the drafts of a window."""

    def limit(self, record: DraftRecord, num_decoding: int) -> int:
        """The limit of a request in a step with ``num_decoding`` requests, itself included."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLimits:
    """Every window may have k drafts."""

    num_speculative_tokens: int

    def limit(self, record: DraftRecord, num_decoding: int) -> int:
        """As ``DraftLimits``."""
        return self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class AdaptiveLimits:
    """Every window may have the drafts that pay off; none if the drafter proposed none."""

    num_speculative_tokens: int
    rows_per_weight_read: int

    def limit(self, record: DraftRecord, num_decoding: int) -> int:
        """As ``DraftLimits``."""
        k = self.num_speculative_tokens
        if num_decoding * (k + 1) <= FREE_ROWS:
            return k
        if not record.proposes:
            return 0
        least = least_chance(num_decoding, self.rows_per_weight_read)
        # The most drafts with ``chance`` of that or more.
        return min(k, int(math.log(least) / math.log(record.rate)))


def draft_limits(limits: SchedulerLimits) -> DraftLimits:
    """The configured policy."""
    k = limits.num_speculative_tokens
    if not limits.adaptive_drafts:
        return FixedLimits(k)
    return AdaptiveLimits(k, limits.rows_per_weight_read)

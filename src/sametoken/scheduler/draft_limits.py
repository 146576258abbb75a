"""How many drafts are worth their rows: by load, and by what became of a request's last ones.

A step takes about as long as reading the weights and computing its rows. With A rows computed in
the time of that read, n requests that decode make n tokens in the time of n + A rows, so one more
row is worth its time if its chance of a token is n / (n + A) or more. The limits decide who
computes how much, never which token is emitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sametoken.scheduler.limits import SchedulerLimits

#: Steps of so few rows take as long as a step of one.
FREE_ROWS = 16

#: What is believed of a drafter before it was judged, and for how many judged drafts that counts.
PRIOR_RATE = 0.8
PRIOR_WEIGHT = 1.0

#: What is left of a window's evidence one window later.
DECAY = 0.9


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """What the settled windows of one request tell of its drafts.

    Without new evidence it fades back to the prior, so that a request that was refused drafts
    is tried again.

    Attributes:
        accepted: drafts that were accepted, older windows counting less.
        judged: those and the first refused one of each window, counted alike.
        proposes: whether the drafter had any draft for the newest settled window, offered or not.
    """

    accepted: float = 0.0
    judged: float = 0.0
    proposes: bool = True

    @property
    def rate(self) -> float:
        """The chance that a draft is accepted if all before it are; below 1."""
        return (PRIOR_RATE * PRIOR_WEIGHT + self.accepted) / (PRIOR_WEIGHT + self.judged)

    def after(self, num_drafts: int, num_proposed: int, num_accepted: int) -> DraftRecord:
        """The record once another window is settled; counts are as in ``RequestResult``."""
        judged = num_accepted + (num_accepted < num_drafts)
        return DraftRecord(
            DECAY * self.accepted + num_accepted, DECAY * self.judged + judged, num_proposed > 0
        )


class DraftLimits(Protocol):
    """How many drafts a window may have, as far as their worth goes."""

    def limit(self, record: DraftRecord, num_decoding: int) -> int:
        """The limit of a request in a step where so many decode, itself included."""
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
    """As many drafts as are likely enough to be accepted, and none for whom nothing is proposed."""

    num_speculative_tokens: int
    rows_per_weight_read: int

    def limit(self, record: DraftRecord, num_decoding: int) -> int:
        """As ``DraftLimits``."""
        k = self.num_speculative_tokens
        if num_decoding * (k + 1) <= FREE_ROWS:
            return k
        if not record.proposes:
            return 0
        least_chance = num_decoding / (num_decoding + self.rows_per_weight_read)
        # Draft i and all before it are accepted with the chance rate ** i.
        return min(k, int(math.log(least_chance) / math.log(record.rate)))


def draft_limits(limits: SchedulerLimits) -> DraftLimits:
    """The limits that were asked for."""
    k = limits.num_speculative_tokens
    if not limits.adaptive_drafts:
        return FixedLimits(k)
    return AdaptiveLimits(k, limits.rows_per_weight_read)

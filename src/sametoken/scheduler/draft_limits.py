"""Draft limits per request, and drafts that are made, adapted to load and recent acceptance.

A step takes the time of what it reads whatever its rows, of the experts that its rows choose, and
of computing its rows. A draft is worth its row if its probability of a token is at least what the
row's time is worth: the step's tokens by its time. Such drafts make the most tokens a second.
Where a model's pass for each draft takes time too, it makes as many as make the most tokens by the
time of a step with as many passes. Neither changes which token is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sametoken.scheduler.request_state import RequestState

#: Prior of the acceptance rate, and its weight, in verified drafts a request, in the crowd's.
PRIOR_RATE = 0.8
PRIOR_WEIGHT = 0.5

#: Bounds of the weight, in verified drafts, that the crowd's rate has in a request's own.
CROWD_WEIGHTS = 1.0, 20.0

#: Exponential decay of the counts per window.
DECAY = 0.95


class DraftRecord(NamedTuple):
    """Acceptance counts over the processed windows of one request.

    Attributes:
        accepted: accepted drafts, exponentially decayed.
        verified: accepted drafts and the first rejected one of each window, decayed alike.
        proposes: whether the drafter had a draft for the newest processed window, offered or not.
    """

    accepted: float = 0.0
    verified: float = 0.0
    proposes: bool = True

    def after(self, num_drafts: int, num_proposed: int, num_accepted: int) -> DraftRecord:
        """The record after one more window; counts are as in ``RequestResult``."""
        verified = num_accepted + (num_accepted < num_drafts)
        return DraftRecord(
            DECAY * self.accepted + num_accepted,
            DECAY * self.verified + verified,
            num_proposed > 0,
        )


class Window(NamedTuple):
    """A decoding request's next window.

    Attributes:
        rate: estimated probability that a draft is accepted if all before it are; below 1.
        most: drafts that it may have.
    """

    rate: float
    most: int

    def chance(self, num_drafts: int) -> float:
        """Estimated probability that this number of drafts is accepted."""
        return self.rate**num_drafts

    def expected(self, num_drafts: int) -> float:
        """Estimated number of accepted drafts of a window with this number of them."""
        return self.rate * (1 - self.chance(num_drafts)) / (1 - self.rate)

    def limit(self, least_chance: float) -> int:
        """Its drafts that have this chance or more; the chance is above 0."""
        if least_chance > self.rate:
            return 0
        return min(self.most, int(math.log(least_chance) / math.log(self.rate)))


def windows_of(
    requests: Mapping[RequestState, tuple[DraftRecord, int]], *, dead_rows: bool = True
) -> dict[RequestState, Window]:
    """The windows of a step's decoding requests.

    A request's rate is a mean of its own and the crowd's, as an empirical Bayes estimate has it:
    the less the requests differ beyond what chance explains, the more weight the crowd's has.
    Without new drafts the counts fade, so that a request with a limit of 0 gets drafts again.
    Without a proposal in the newest window there are none, if they took rows all the same.

    Args:
        requests: the record of each, and the drafts that it may have.
        dead_rows: as in ``StepReads``.
    """
    records = [record for record, _ in requests.values()]
    prior = PRIOR_WEIGHT * len(records)
    accepted = sum(record.accepted for record in records)
    verified = sum(record.verified for record in records)
    rate = (prior * PRIOR_RATE + accepted) / (prior + verified)
    weight = _crowd_weight(records, rate)
    return {
        request: Window(
            (weight * rate + record.accepted) / (weight + record.verified),
            most if record.proposes or not dead_rows else 0,
        )
        for request, (record, most) in requests.items()
    }


def _crowd_weight(records: Sequence[DraftRecord], rate: float) -> float:
    """Verified drafts that the crowd's rate counts as, by the method of moments.

    The variance of a beta distribution with this weight is that between the requests' rates,
    beyond the variance of drawing each from its number of drafts; counts that faded below one draft
    say less of both.
    """
    least, most = CROWD_WEIGHTS
    seen = [record for record in records if record.verified]
    spread = sum((one.accepted - one.verified * rate) ** 2 / one.verified for one in seen)
    drawn, num_drawn = rate * (1 - rate), sum(min(1.0, one.verified) for one in seen)
    beyond = (spread - num_drawn * drawn) / max(1.0, sum(one.verified for one in seen))
    return max(least, min(most, drawn / beyond - 1)) if beyond > 0 else most


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step by its rows; the unit is the time in which the device computes a row.

    Attributes:
        reads: what is read whatever the rows.
        experts: reading all experts.
        share: of the experts that a row chooses; others' choices are independent of them.
        draft: a drafter's pass for a draft of each request.
        catch_up: what of a pass runs even if no draft is wanted.
    """

    reads: float
    experts: float = 0.0
    share: float = 0.0
    draft: float = 0.0
    catch_up: float = 0.0

    def of(self, num_rows: int, num_padding: int = 0) -> float:
        """The time of a step; rows of padding are computed and choose no experts."""
        chosen = 1 - (1 - self.share) ** num_rows
        return num_rows + num_padding + self.reads + self.experts * chosen

    def of_passes(self, num_wanted: int) -> float:
        """The time of the drafter's passes; the first one is a step's catch-up too."""
        return max(self.catch_up, num_wanted * self.draft)

    def of_experts(self, num_rows: int) -> float:
        """Time to read the experts that one row more chooses and no other of the rows does."""
        return self.experts * self.share * (1 - self.share) ** num_rows


@dataclass(frozen=True, slots=True)
class StepReads:
    """What steps read.

    Attributes:
        weights_bytes: of the target, whatever the rows, with those that could be read in the time
            of all else that a step does.
        row_bytes: read in the time in which the device computes a row.
        kv_bytes: of a position, in the layers that see all of them.
        state_bytes: of a request's recurrent state.
        experts_bytes: of all experts.
        experts_share: the share of them that a row chooses.
        dead_rows: whether drafts that a window may have take rows where there are none.
        free_rows: steps of up to this many take as long as of one, unless they choose experts.
        draft_share, catch_up_share: a drafter's bytes as in ``LoadedDrafter``, by those of a step;
            0 if all passes run whatever is wanted.
    """

    weights_bytes: float
    row_bytes: float = 1.0
    kv_bytes: int = 0
    state_bytes: int = 0
    experts_bytes: int = 0
    experts_share: float = 0.0
    dead_rows: bool = True
    free_rows: int = 0
    draft_share: float = 0.0
    catch_up_share: float = 0.0

    def time(self, num_requests: int, num_positions: int) -> StepTime:
        """The time of steps with these decoding requests, with ``num_positions`` in all."""
        caches = num_positions * self.kv_bytes + num_requests * self.state_bytes
        reads = (self.weights_bytes + caches) / self.row_bytes
        target = StepTime(reads, self.experts_bytes / self.row_bytes, self.experts_share)
        single = target.of(num_requests)
        return replace(
            target, draft=self.draft_share * single, catch_up=self.catch_up_share * single
        )


@dataclass(frozen=True, slots=True)
class DraftWorth:
    """What the drafts of a step's decoding requests are worth."""

    windows: Mapping[RequestState, Window]
    time: StepTime

    def limits(self, num_beside: int) -> dict[RequestState, int]:
        """Drafts of each window that are worth their rows.

        One or two iterations of a ratio, which no other limits exceed by much: from a step without
        drafts, and where rows share experts, which makes many drafts worth what few are not, from
        one with all of them.

        Args:
            num_beside: rows of prompts in the step, which choose experts too.
        """
        single = self._worth_it({}, num_beside)
        found = self._worth_it(single, num_beside)
        if not self.time.experts:
            return found
        most = {request: window.most for request, window in self.windows.items()}
        return max(found, self._worth_it(most, num_beside), key=self.tokens_per_time)

    def num_wanted(self) -> int:
        """Drafts of each window that are worth a drafter's passes; the fewest of equals."""
        limits = self.limits(0)

        def rate(most: int) -> float:
            drafts = {request: min(limit, most) for request, limit in limits.items()}
            return self.tokens_per_time(drafts, most)

        return max(range(max(limits.values()) + 1), key=rate)

    def tokens_per_time(self, drafts: Mapping[RequestState, int], num_wanted: int = 0) -> float:
        """Expected tokens of windows with these drafts, by the time of a step of them alone."""
        num_windows = len(self.windows)
        tokens = num_windows + self.accepted(drafts)
        rows = num_windows + sum(drafts.values())
        return tokens / (self.time.of(rows) + self.time.of_passes(num_wanted))

    def accepted(self, drafts: Mapping[RequestState, int]) -> float:
        """Expected number of accepted drafts."""
        return sum(self.windows[request].expected(n) for request, n in drafts.items())

    def _worth_it(
        self, drafts: Mapping[RequestState, int], num_beside: int
    ) -> dict[RequestState, int]:
        """Drafts that are worth their rows beside a step with ``drafts``."""
        num_rows = len(self.windows) + sum(drafts.values())
        row = 1 + self.time.of_experts(num_rows + num_beside)
        least_chance = self.tokens_per_time(drafts) * row
        return {request: window.limit(least_chance) for request, window in self.windows.items()}

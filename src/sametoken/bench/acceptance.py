"""Acceptance per draft position, and the faults of a drafter that it shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sametoken.types.outputs import SpeculationMetrics

OTHER_DRAFTER = "drafter of another model or vocabulary"
BEYOND_FIRST = "acceptance lost beyond position 1"

#: Fewer verified drafts than this are no evidence.
MIN_DRAFTS = 50
NEAR_CHANCE = 0.05
#: Later drafts are accepted less often than first ones, but not below this share of their rate.
LATER_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of low acceptance.

    Attributes:
        cause: what is wrong; one of the constants, as reports print it.
        evidence: the figures that show it.
        remedy: what to try.
    """

    cause: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Acceptance counts by draft position, from position 1.

    Attributes:
        judged: drafts at the position whose predecessors were all accepted.
        accepted: how many of those were accepted.
    """

    judged: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of_windows(cls, windows: Iterable[tuple[int, int]]) -> Profile:
        """Count (num_drafts, num_accepted) of each step."""
        pairs = list(windows)
        width = max((num_drafts for num_drafts, _ in pairs), default=0)
        places = range(1, width + 1)
        judged = tuple(sum(d >= i and a >= i - 1 for d, a in pairs) for i in places)
        return cls(judged, tuple(sum(a >= i for _, a in pairs) for i in places))

    @classmethod
    def of_metrics(cls, metrics: SpeculationMetrics) -> Profile:
        """Convert an engine's counters; exact if all steps offer the same number of drafts."""
        judged = []
        before = metrics.num_steps
        for offered, accepted in zip(
            metrics.offered_per_position, metrics.accepted_per_position, strict=True
        ):
            judged.append(min(offered, before))
            before = accepted
        return cls(tuple(judged), metrics.accepted_per_position)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Acceptance rate at each position, given that every draft before it was accepted."""
        pairs = zip(self.accepted, self.judged, strict=True)
        return tuple(accepted / judged if judged else 0.0 for accepted, judged in pairs)

    @property
    def first(self) -> float:
        """Acceptance rate of first drafts; 0 without any."""
        return self.conditional[0] if self.judged else 0.0

    @property
    def later(self) -> float:
        """Acceptance rate of all later drafts together, each given its predecessors."""
        return sum(self.accepted[1:]) / self.num_later if self.num_later else 0.0

    @property
    def num_first(self) -> int:
        """Number of verified first drafts."""
        return self.judged[0] if self.judged else 0

    @property
    def num_later(self) -> int:
        """Number of verified later drafts."""
        return sum(self.judged[1:])


def profile_findings(profile: Profile, *, trained: bool) -> tuple[Finding, ...]:
    """Find the causes of low acceptance that one profile shows.

    Args:
        profile: the counts of a run.
        trained: whether the drafter is a model. Prompt lookup has no expected acceptance.
    """
    if not trained or profile.num_first < MIN_DRAFTS:
        return ()
    if profile.first < NEAR_CHANCE:
        return (
            Finding(
                OTHER_DRAFTER,
                f"{profile.first:.1%} of {profile.num_first} first drafts are accepted",
                "use a drafter trained for this target, with its tokenizer",
            ),
        )
    if profile.num_later >= MIN_DRAFTS and profile.later < LATER_SHARE * profile.first:
        return (
            Finding(
                BEYOND_FIRST,
                f"first drafts {profile.first:.1%}, later ones {profile.later:.1%} given their "
                "predecessors",
                "suspect stale lengths or metadata: compare with enforce_eager, and with k=1",
            ),
        )
    return ()


def one_line(metrics: SpeculationMetrics, *, trained: bool) -> str:
    """Format acceptance as one line, with the finding if there is one."""
    profile = Profile.of_metrics(metrics)
    if not profile.num_first:
        return "no drafts were offered"
    summary = (
        f"{metrics.acceptance_length:.2f} tokens per step; "
        f"first drafts accepted {profile.first:.0%}, later ones {profile.later:.0%}"
    )
    findings = profile_findings(profile, trained=trained)
    return "; ".join((summary, *(f"{f.cause}: {f.remedy}" for f in findings)))

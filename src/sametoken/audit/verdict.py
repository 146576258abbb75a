"""The result of an audit, as plain values for JSON and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sametoken.audit.compare import CORRUPTION, SAMPLED, TIE, Comparison
from sametoken.audit.diagnosis import Diagnosis
from sametoken.audit.text_defects import TextDefect

IDENTICAL, TIES_ONLY = "identical", "differs at near ties only"
NONDETERMINISTIC = "nondeterministic without speculation too"
UNSTEADY = "differs from itself, which the baseline does not"
SAMPLES_DIFFER = "other samples, the same greedy tokens but for near ties"
CORRUPTED, DIFFERENT = "corrupted", "differs"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit found.

    Attributes:
        subject, baseline: what was compared, in words.
        comparisons: every run with speculation against the baseline.
        repeats: the baseline against itself first, then the subject; empty if neither can differ.
        noise: the largest difference of a token's log-probability that the baseline shows
            against itself; None if that is not known.
        defects: signs of corrupted text.
        diagnosis: of acceptance; None if it was not measured.
        texts: tokens in words, by token, for those of the divergences.
    """

    subject: str
    baseline: str
    comparisons: tuple[Comparison, ...]
    repeats: tuple[Comparison, ...] = ()
    noise: float | None = None
    defects: tuple[TextDefect, ...] = ()
    diagnosis: Diagnosis | None = None
    texts: dict[int | str, str] = dataclasses.field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether no token and no bit differs."""
        return all(comparison.identical for comparison in self.comparisons)

    @property
    def summary(self) -> str:
        """The verdict in a few words.

        Corruption is what neither near ties nor the baseline's own repeats explain. Where
        there is none, a side that differs from itself is named.
        """
        if self.identical:
            return IDENTICAL
        logits = sum(comparison.num_logits_differ for comparison in self.comparisons)
        share, own = _share_of(self.comparisons), _share_of(self.repeats[:1])
        if self.defects or logits or share > own:
            return CORRUPTED
        steady = [repeat.identical for repeat in self.repeats]
        if not all(steady):
            return UNSTEADY if steady[0] else NONDETERMINISTIC
        kinds = {d.kind for comparison in self.comparisons for d in comparison.divergences}
        if kinds == {TIE}:
            return TIES_ONLY
        return SAMPLES_DIFFER if kinds <= {TIE, SAMPLED} else DIFFERENT

    def as_json(self) -> dict[str, Any]:
        """Every field, the summary and whether all is identical."""
        return {
            "summary": self.summary,
            "identical": self.identical,
            **dataclasses.asdict(self),
        }


def _share_of(comparisons: Sequence[Comparison]) -> float:
    """The share of requests that are corrupt."""
    total = sum(comparison.num_requests for comparison in comparisons)
    return sum(comparison.count(CORRUPTION) for comparison in comparisons) / total if total else 0.0

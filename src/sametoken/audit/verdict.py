"""The verdict of an audit: JSON values, text for a terminal, and one HTML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sametoken.audit.compare import CORRUPTION, SAMPLED, TIE, Comparison, Divergence, TextDefect
from sametoken.audit.diagnosis import Diagnosis
from sametoken.bench.acceptance import MIN_DRAFTS
from sametoken.bench.documents import render_page
from sametoken.types.units import counted

IDENTICAL, TIES_ONLY = "identical", "differs at near ties only"
NO_DRAFT = "nothing is proved, as no draft was verified: audit more requests, or longer ones"
NONDETERMINISTIC = "nondeterministic without speculation too"
UNSTEADY = "differs from itself, which the baseline does not"
SAMPLES_DIFFER = "other samples, the same greedy tokens but for near ties"
OTHER_MODEL = "another model than the baseline's, or other prompts"
CORRUPTED, DIFFERENT = "corrupted", "differs"
MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an audit.

    Attributes:
        subject, baseline: names of the two sides.
        comparisons: every run with speculation against the baseline.
        repeats: the baseline against itself, then the subject against itself; empty if neither
            can differ.
        noise: the largest margin that counts as a tie; None if unknown.
        num_tokens: tokens of the compared runs with speculation.
        num_drafts: drafts verified in them; None if unknown.
        num_unlike: answers whose first token has other log-probabilities than noise allows.
        defects: signs of corrupted text.
        diagnosis: diagnosis of acceptance; None if not measured.
        texts: texts of the divergences' tokens.
        workload: "model", "adapter", "dataset", the number of "prompts", "temperatures" and
            "max_tokens".
        environment: as in the documents of ``bench``.
    """

    subject: str
    baseline: str
    comparisons: tuple[Comparison, ...]
    repeats: tuple[Comparison, ...] = ()
    noise: float | None = None
    num_tokens: int = 0
    num_drafts: int | None = None
    num_unlike: int = 0
    defects: tuple[TextDefect, ...] = ()
    diagnosis: Diagnosis | None = None
    texts: dict[int | str, str] = dataclasses.field(default_factory=dict)
    workload: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether no token and no bit differs, though drafts were verified or may have been."""
        return self.summary == IDENTICAL

    @property
    def is_of_another_model(self) -> bool:
        """Whether most answers differ at their first token, which no draft can change."""
        return 2 * self.num_unlike > self.comparisons[0].num_requests

    @property
    def summary(self) -> str:
        """The verdict in a few words.

        Corruption is a difference that neither near ties nor the baseline's own repeats
        explain. Without corruption, a side that differs from itself is named.
        """
        if all(comparison.identical for comparison in self.comparisons):
            return NO_DRAFT if self.num_drafts == 0 else IDENTICAL
        if self.is_of_another_model:
            return OTHER_MODEL
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

    @property
    def headline(self) -> str:
        """The summary; of identical tokens with what it rests on, as few drafts prove little."""
        if not self.identical:
            return self.summary
        drafts = "an unknown number of drafts"
        if self.num_drafts is not None:
            drafts = counted(self.num_drafts, "draft")
        return f"{self.summary}, with {drafts} verified in {counted(self.num_tokens, 'token')}"

    @property
    def has_few_drafts(self) -> bool:
        """Whether acceptance was measured on too few drafts to find causes in it."""
        diagnosis = self.diagnosis
        return diagnosis is not None and diagnosis.profiles["running"].num_first < MIN_DRAFTS

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON values: every field, and ``summary`` and its like."""
        return {
            "summary": self.summary,
            "headline": self.headline,
            "identical": self.identical,
            "has_few_drafts": self.has_few_drafts,
            **dataclasses.asdict(self),
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict as lines of text."""
        yield f"{self.subject} against {self.baseline}: {self.headline}"
        for comparison in (*self.repeats, *self.comparisons):
            yield f"  {comparison.name}: {_counts(comparison)}"
        yield f"  drafts verified: {'unknown' if self.num_drafts is None else self.num_drafts}"
        if self.is_of_another_model:
            count = f"{self.num_unlike} of {self.comparisons[0].num_requests}"
            yield f"  {count} first tokens, which no draft can change, have other log-probabilities"
        if self.noise is not None:
            yield f"  measured noise of log-probabilities: {self.noise:.3g}"
        shown = [d for comparison in self.comparisons for d in comparison.divergences]
        for divergence in shown[:MAX_SHOWN]:
            yield f"  {_divergence(self, divergence)}"
        if len(shown) > MAX_SHOWN:
            yield f"  and {len(shown) - MAX_SHOWN} more"
        for defect in self.defects[:MAX_SHOWN]:
            yield f"  {defect.request}: {defect.kind}, {defect.detail}"
        if self.diagnosis is not None:
            yield from _diagnosis(self.diagnosis)
            if not self.diagnosis.findings:
                few = "too few drafts for a finding: audit more requests, or longer ones"
                none = "no cause for concern found"
                yield f"  acceptance: {few if self.has_few_drafts else none}"

    def html(self) -> str:
        """Render the verdict as one self-contained HTML page."""
        folder = resources.files("sametoken.audit").joinpath("page")
        return render_page(folder, "audit", f"{self.subject}: audit", self.as_json())


def _share_of(comparisons: Sequence[Comparison]) -> float:
    """Return the share of corrupt requests."""
    total = sum(comparison.num_requests for comparison in comparisons)
    return sum(comparison.count(CORRUPTION) for comparison in comparisons) / total if total else 0.0


def _counts(comparison: Comparison) -> str:
    if comparison.num_logits:
        equal = comparison.num_logits - comparison.num_logits_differ
        return f"{equal} of {comparison.num_logits} positions bit-equal"
    differ = len(comparison.divergences)
    kinds = sorted({divergence.kind for divergence in comparison.divergences})
    counted = ", ".join(f"{comparison.count(kind)} {kind}" for kind in kinds)
    detail = f" ({counted})" if counted else ""
    return f"{differ} of {comparison.num_requests} requests differ{detail}"


def _divergence(verdict: Verdict, divergence: Divergence) -> str:
    expected, found = (
        "the end" if token is None else repr(verdict.texts.get(token, token))
        for token in (divergence.expected, divergence.found)
    )
    parts = [f"{divergence.request}, token {divergence.position}: {found} in place of {expected}"]
    if divergence.margin is not None:
        parts.append(f"margin {divergence.margin:.3g}")
    if divergence.window is not None:
        w = divergence.window
        place = "the target's own" if divergence.draft is None else f"draft {divergence.draft}"
        parts.append(f"{place} of a window with {w.num_drafts} drafts, {w.num_accepted} accepted")
    return "; ".join((*parts, divergence.kind))


def _diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    for name, profile in diagnosis.profiles.items():
        if profile.num_first:
            rates = " ".join(f"{rate:.2f}" for rate in profile.conditional)
            yield f"  acceptance per position, {name}: {rates}"
    for finding in diagnosis.findings:
        yield f"  {finding.cause}: {finding.evidence}; {finding.remedy}"

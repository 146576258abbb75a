"""A verdict as text for a terminal and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from sametoken.audit.compare import Comparison, Divergence
from sametoken.audit.diagnosis import Diagnosis
from sametoken.audit.verdict import Verdict
from sametoken.bench.html import embedded_json

MAX_SHOWN = 10


def lines_of(verdict: Verdict) -> Iterator[str]:
    """The verdict, line by line."""
    yield f"{verdict.subject} against {verdict.baseline}: {verdict.summary}"
    for comparison in (*verdict.repeats, *verdict.comparisons):
        yield f"  {comparison.name}: {_counts(comparison)}"
    if verdict.noise is not None:
        yield f"  measured noise of log-probabilities: {verdict.noise:.3g}"
    shown = [d for comparison in verdict.comparisons for d in comparison.divergences]
    for divergence in shown[:MAX_SHOWN]:
        yield f"  {_divergence(verdict, divergence)}"
    if len(shown) > MAX_SHOWN:
        yield f"  and {len(shown) - MAX_SHOWN} more"
    for defect in verdict.defects[:MAX_SHOWN]:
        yield f"  {defect.request}: {defect.kind}, {defect.detail}"
    if verdict.diagnosis is not None:
        yield from _diagnosis(verdict.diagnosis)


def html_of(verdict: Verdict) -> str:
    """A page that works from disk, with the verdict's JSON inside."""
    page = resources.files("sametoken.audit").joinpath("report.html").read_text(encoding="utf-8")
    return page.replace("__VERDICT__", embedded_json(verdict.as_json()))


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
    if not diagnosis.findings:
        yield "  acceptance: no cause for concern found"

"""Audit a server against another one, or against this engine.

Each side answers twice, so that a server's own nondeterminism is not attributed to speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sametoken.audit.asks import Answers, AuditRequest, num_tokens_of
from sametoken.audit.compare import (
    REPEATED,
    SAMPLED,
    TIE,
    Comparison,
    TextDefect,
    compare,
    differences,
    text_defects,
)
from sametoken.audit.diagnosis import Diagnosis
from sametoken.audit.servers import Server, query_server, read_counters
from sametoken.audit.verdict import Verdict
from sametoken.bench.acceptance import Profile, profile_findings
from sametoken.bench.report import environment
from sametoken.bench.scrape import Counters

#: A larger difference of log-probabilities is not rounding: bf16 logits near 32 step by 1/8.
MOST_NOISE = 0.25
#: Possible rounding steps of low-precision logits, the coarsest first.
LOGIT_STEPS = tuple(2.0**-n for n in range(1, 8))
#: Evidence that logits are rounded: the number of gaps, the share of them that are whole steps,
#: and the number of different gaps.
LEAST_GAPS, SHARE_IN_STEPS, LEAST_SIZES = 24, 0.75, 4
#: Noise can flip tokens up to twice its size apart; a further factor 2 covers unobserved noise.
MARGIN_OVER_NOISE = 4

OF_LOOKUPS = "of drafts that are looked up (ngram, suffix) this is no defect"

AnswerAll = Callable[[Sequence[AuditRequest]], Answers]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: shown in reports.
        answer: answers all requests.
        counters: reads the side's speculation counters, if it has any.
        text_of: text of a token id, for a side whose tokens are ids.
    """

    name: str
    answer: AnswerAll
    counters: Callable[[], Counters | None] = lambda: None
    text_of: Callable[[int], str] = str


def server_side(server: Server, concurrency: int) -> Side:
    """Make a side of a server."""
    return Side(
        server.root,
        lambda requests: query_server(server, requests, concurrency=concurrency),
        lambda: read_counters(server),
    )


def audit_sides(
    subject: Side,
    baseline: Side,
    requests: Sequence[AuditRequest],
    *,
    announce: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Run the requests twice on both sides and compare.

    Args:
        subject: the side with speculation.
        baseline: the side without it.
        requests: the requests.
        announce: called with one line per phase.

    Raises:
        RequestError: as ``query_server``.
    """
    announce(f"running {baseline.name} twice")
    expected, again = baseline.answer(requests), baseline.answer(requests)
    announce(f"running {subject.name} twice")
    before = subject.counters()
    found, found_again = subject.answer(requests), subject.answer(requests)
    counted = _counted(before, subject.counters())
    runs = ((baseline, expected), (baseline, again), (subject, found), (subject, found_again))
    said = (answer for _, answers in runs for answer in answers.values())
    by_id = all(isinstance(token, int) for answer in said for token in answer.tokens)
    expected, again, found, found_again = (
        _as_texts(answers, side.text_of, tokens=not by_id) for side, answers in runs
    )
    noise = kernel_noise((expected, again), ((found, found_again), (expected, found)))
    if noise is not None:
        noise += max(map(logit_step, (expected, again, found, found_again)))
    sampled = frozenset(request.name for request in requests if request.temperature)

    def against(name: str, one: Answers, other: Answers) -> Comparison:
        return compare(name, one, other, noise=noise, sampled=sampled)

    speculation = against("speculation", expected, found)
    return Verdict(
        subject=subject.name,
        baseline=baseline.name,
        comparisons=(
            speculation,
            against("speculation, again", expected, found_again),
        ),
        repeats=(
            against("baseline against itself", expected, again),
            against("subject against itself", found, found_again),
        ),
        noise=noise,
        num_tokens=num_tokens_of(found) + num_tokens_of(found_again),
        num_drafts=counted.num_draft_tokens,
        num_unlike=_num_unlike((expected, again), (found, found_again)),
        defects=_defects(speculation, expected, found, found_again),
        diagnosis=_diagnosis(counted),
        environment=environment(None),
    )


def _defects(
    comparison: Comparison, expected: Answers, found: Answers, again: Answers
) -> tuple[TextDefect, ...]:
    """Return the defects that neither a near tie nor chance explains.

    Divergences at the end of the baseline's answer are skipped. A different sample may end
    elsewhere or loop by chance: there only a fragment counts, and only if the subject repeats
    its answer.
    """
    defects: list[TextDefect] = []
    for divergence in comparison.divergences:
        request = divergence.request
        if divergence.kind == TIE or divergence.expected is None:
            continue
        shown = text_defects(request, expected[request], found[request])
        if divergence.kind == SAMPLED:
            repeats = found[request].tokens == again[request].tokens
            shown = tuple(d for d in shown if repeats and d.kind == REPEATED)
        defects.extend(shown)
    return tuple(defects)


def _num_unlike(baseline: tuple[Answers, Answers], subject: tuple[Answers, Answers]) -> int:
    """Count the answers whose first tokens differ more between the sides than by noise."""
    return len(_unlike(baseline[0], subject[0]) - _unlike(*baseline) - _unlike(*subject))


def _unlike(one: Answers, other: Answers) -> set[str]:
    """The requests whose first tokens differ by more than noise in their log-probabilities."""
    return {
        name
        for name, answer in other.items()
        if one[name].top
        and answer.top
        # Without a candidate in common nothing is alike.
        and max(differences(one, {name: answer}, most=1), default=math.inf) > MOST_NOISE
    }


def kernel_noise(
    repeats: tuple[Answers, Answers], crossed: Sequence[tuple[Answers, Answers]]
) -> float | None:
    """Estimate the noise of log-probabilities at positions that no draft can have affected.

    These are all positions of the baseline's two runs, and the first token of any other pair,
    which depends on the prompt alone. At most ``MOST_NOISE``.

    Args:
        repeats: two runs of the baseline.
        crossed: other pairs of runs.

    Returns:
        ``MARGIN_OVER_NOISE`` times the largest difference; None without comparable positions.
    """
    seen = [*differences(*repeats)]
    for one, other in crossed:
        seen.extend(differences(one, other, most=1))
    if not seen:
        return None
    return min(MARGIN_OVER_NOISE * max(seen), MOST_NOISE)


def logit_step(answers: Answers) -> float:
    """Estimate the rounding step of a side's logits; 0 if they are not rounded or too few.

    bf16 logits have 8 significant bits, so that gaps between the two best are whole steps.
    Logits one step apart may have been equal before rounding; deterministic kernels do not
    show this by repetition.
    """
    tops = (top for answer in answers.values() for top in answer.top if len(top) > 1)
    gaps = [gap for (_, best), (_, second), *_ in tops if (gap := best - second) > 0]
    if len(gaps) < LEAST_GAPS:
        return 0.0
    for step in LOGIT_STEPS:
        steps = [gap / step for gap in gaps if abs(gap / step - round(gap / step)) < 1 / 64]
        if len(steps) >= SHARE_IN_STEPS * len(gaps) and len({*map(round, steps)}) >= LEAST_SIZES:
            # The tolerance with which gaps are measured.
            return step * (1 + 1 / 64)
    return 0.0


def _as_texts(answers: Answers, text_of: Callable[[int], str], *, tokens: bool) -> Answers:
    """Convert candidates to texts, as servers return them, and optionally the tokens."""

    def word(token: int | str) -> str:
        return text_of(token) if isinstance(token, int) else token

    return {
        name: replace(
            answer,
            tokens=answer.texts or tuple(map(word, answer.tokens)) if tokens else answer.tokens,
            top=tuple(tuple((word(t), p) for t, p in top) for top in answer.top),
        )
        for name, answer in answers.items()
    }


def _counted(before: Counters | None, after: Counters | None) -> Counters:
    """What the server counted between two snapshots; nothing if that is unknown."""
    if before is None or after is None:
        return Counters()
    counted = after.since(before)
    return Counters() if counted.went_back else counted


def _diagnosis(counted: Counters) -> Diagnosis | None:
    """Diagnose the acceptance of the audit's requests from the server's counters."""
    by_position = counted.by_position()
    if counted.speculation() is None or not by_position:
        return None
    offered, accepted = zip(*((int(there), int(n)) for there, n in by_position), strict=True)
    profile = Profile(tuple(map(min, offered, (offered[0], *accepted))), accepted)
    findings = profile_findings(profile, trained=True)
    # No server says how it drafts.
    return Diagnosis(
        {"running": profile},
        (),
        tuple(replace(one, remedy=f"{one.remedy}; {OF_LOOKUPS}") for one in findings),
    )

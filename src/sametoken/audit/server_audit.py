"""Audit a server against another one, or against this engine.

Each side is asked twice first: what a server does not repeat by itself is not blamed on
speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sametoken.audit.asks import (
    Answers,
    Ask,
)
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
from sametoken.audit.servers import Server, ask_server, read_counters
from sametoken.audit.verdict import Verdict
from sametoken.bench.acceptance import Profile, profile_findings
from sametoken.bench.scrape import ACCEPTED_PER_POSITION, Counters

#: A larger difference of log-probabilities is no rounding: bf16 logits near 32 step by 1/8.
MOST_NOISE = 0.25
#: Steps in which logits of few bits may be rounded, the coarsest first.
LOGIT_STEPS = tuple(2.0**-n for n in range(1, 8))
#: So many gaps, such a share of them in whole steps, and gaps of so many sizes tell that logits
#: are rounded.
LEAST_GAPS, SHARE_IN_STEPS, LEAST_SIZES = 24, 0.75, 4
#: A flip needs a margin of twice the noise at most; the largest seen is not the largest there is.
MARGIN_OVER_NOISE = 4

AskAll = Callable[[Sequence[Ask]], Answers]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: in words.
        ask: answers all asks.
        counters: the side's speculation counters, if it has any.
        text_of: text of one of its token ids, for a side whose tokens are ids.
    """

    name: str
    ask: AskAll
    counters: Callable[[], Counters | None] = lambda: None
    text_of: Callable[[int], str] = str


def server_side(server: Server, concurrency: int) -> Side:
    """A server as a side."""
    return Side(
        server.root,
        lambda asks: ask_server(server, asks, concurrency=concurrency),
        lambda: read_counters(server),
    )


def audit_sides(
    subject: Side,
    baseline: Side,
    asks: Sequence[Ask],
    *,
    announce: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Ask both sides twice and compare.

    Args:
        subject: the side with speculation.
        baseline: the side without it.
        asks: what is asked.
        announce: told in one line what runs.

    Raises:
        RequestError: as ``ask_server``.
    """
    announce(f"asking {baseline.name} twice")
    truth, again = baseline.ask(asks), baseline.ask(asks)
    announce(f"asking {subject.name} twice")
    before = subject.counters()
    found, found_again = subject.ask(asks), subject.ask(asks)
    after = subject.counters()
    has_ids = _has_ids(found)
    truth, again = (
        _in_words(answers, baseline.text_of, tokens=not has_ids) for answers in (truth, again)
    )
    noise = kernel_noise((truth, again), ((found, found_again), (truth, found)))
    if noise is not None:
        noise += max(map(logit_step, (truth, again, found, found_again)))
    sampled = frozenset(ask.name for ask in asks if ask.temperature)

    def against(name: str, one: Answers, other: Answers) -> Comparison:
        return compare(name, one, other, noise=noise, sampled=sampled)

    speculation = against("speculation", truth, found)
    return Verdict(
        subject=subject.name,
        baseline=baseline.name,
        comparisons=(
            speculation,
            against("speculation, again", truth, found_again),
        ),
        repeats=(
            against("baseline against itself", truth, again),
            against("subject against itself", found, found_again),
        ),
        noise=noise,
        defects=_defects(speculation, truth, found, found_again),
        diagnosis=_diagnosis(before, after),
    )


def _defects(
    comparison: Comparison, truth: Answers, found: Answers, again: Answers
) -> tuple[TextDefect, ...]:
    """Defects that neither a near tie nor chance explains.

    Nothing is told from where the baseline's answer had ended. Other samples may well end
    elsewhere, and may loop once: there a fragment counts if the subject repeats its answer.
    """
    defects: list[TextDefect] = []
    for divergence in comparison.divergences:
        request = divergence.request
        if divergence.kind == TIE or divergence.expected is None:
            continue
        shown = text_defects(request, truth[request], found[request])
        if divergence.kind == SAMPLED:
            lasting = found[request].tokens == again[request].tokens
            shown = tuple(d for d in shown if lasting and d.kind == REPEATED)
        defects.extend(shown)
    return tuple(defects)


def kernel_noise(
    repeats: tuple[Answers, Answers], crossed: Sequence[tuple[Answers, Answers]]
) -> float | None:
    """How far log-probabilities of equal contexts lie apart where no draft was ever judged.

    That is everywhere in the baseline's two runs, and at the first token of any other two:
    it comes from the prompt alone. Never above ``MOST_NOISE``.

    Args:
        repeats: the baseline, asked twice.
        crossed: other pairs of runs.

    Returns:
        ``MARGIN_OVER_NOISE`` times the largest difference; None if there is none to see.
    """
    seen = [*differences(*repeats)]
    for one, other in crossed:
        seen.extend(differences(one, other, most=1))
    if not seen:
        return None
    return min(MARGIN_OVER_NOISE * max(seen), MOST_NOISE)


def logit_step(answers: Answers) -> float:
    """The step in which a side rounds its logits; 0 if it does not, or shows too little.

    Logits in bf16 have 8 bits, so that gaps between the two best are whole steps. Two that lie
    one step apart may have been equal, and no repetition shows that of kernels that repeat.
    """
    tops = (top for answer in answers.values() for top in answer.top if len(top) > 1)
    gaps = [gap for (_, best), (_, second), *_ in tops if (gap := best - second) > 0]
    if len(gaps) < LEAST_GAPS:
        return 0.0
    for step in LOGIT_STEPS:
        steps = [gap / step for gap in gaps if abs(gap / step - round(gap / step)) < 1 / 64]
        if len(steps) >= SHARE_IN_STEPS * len(gaps) and len({*map(round, steps)}) >= LEAST_SIZES:
            # As gaps are measured.
            return step * (1 + 1 / 64)
    return 0.0


def _has_ids(answers: Answers) -> bool:
    return all(isinstance(token, int) for answer in answers.values() for token in answer.tokens)


def _in_words(answers: Answers, text_of: Callable[[int], str], *, tokens: bool) -> Answers:
    """Answers whose candidates are texts, as servers name them; the tokens too if asked for."""

    def word(token: int | str) -> str:
        return text_of(token) if isinstance(token, int) else token

    return {
        name: replace(
            answer,
            tokens=tuple(map(word, answer.tokens)) if tokens else answer.tokens,
            top=tuple(tuple((word(t), p) for t, p in top) for top in answer.top),
        )
        for name, answer in answers.items()
    }


def _diagnosis(before: Counters | None, after: Counters | None) -> Diagnosis | None:
    """Acceptance of the audit's own requests, as far as counters tell it."""
    if before is None or after is None:
        return None
    counted = after.since(before)
    speculation = counted.speculation()
    if counted.went_back or speculation is None:
        return None
    by_position = counted.positions.get(ACCEPTED_PER_POSITION, {})
    accepted = tuple(int(by_position[i]) for i in sorted(by_position))
    judged = (speculation["num_steps"], *accepted[:-1])[: len(accepted)]
    profile = Profile(judged, accepted)
    return Diagnosis({"running": profile}, (), profile_findings(profile, trained=True))

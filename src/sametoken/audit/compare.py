"""Where two runs of the same requests part, and whether a near tie explains it.

Signs of corrupted text: fragments that repeat, and answers cut short.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from sametoken.audit.asks import (
    Answer,
    TopTwo,
)
from sametoken.bench.measure import Window

TIE, CORRUPTION, UNEXPLAINED = "numeric tie", "corruption", "unexplained"
SAMPLED = "sampled otherwise"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a request's answers differ.

    Attributes:
        request: the ask's name.
        position: index in the answer.
        expected, found: the tokens there, None past the end of an answer.
        margin: log-probability of the baseline's best token over its second best there; None
            if it is not known.
        window: the verify step that emitted the found token, if known.
        draft: that token's place among the step's drafts, from 1; None if it was the target's
            own token or the step is not known.
        kind: ``TIE`` if the margin lies within the measured noise, ``CORRUPTION`` if above,
            ``UNEXPLAINED`` if there is no margin to tell by, ``SAMPLED`` if the request draws
            its tokens by a noise that the server does not promise to repeat.
    """

    request: str
    position: int
    expected: int | str | None
    found: int | str | None
    margin: float | None
    window: Window | None
    draft: int | None
    kind: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against the baseline.

    Attributes:
        name: what was run.
        num_requests: answers compared.
        divergences: one for every request that differs.
        num_logits: positions whose log-probabilities were compared bit by bit.
        num_logits_differ: how many of them were not equal.
    """

    name: str
    num_requests: int
    divergences: tuple[Divergence, ...]
    num_logits: int = 0
    num_logits_differ: int = 0

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not self.divergences and not self.num_logits_differ

    def count(self, kind: str) -> int:
        """Requests that differ in this way."""
        return sum(divergence.kind == kind for divergence in self.divergences)


def compare(
    name: str,
    baseline: Mapping[str, Answer],
    found: Mapping[str, Answer],
    *,
    noise: float | None,
    margins: Mapping[str, Answer] | None = None,
    sampled: Collection[str] = (),
) -> Comparison:
    """Compare the requests of ``found`` with the baseline's.

    Args:
        name: what ``found`` is.
        baseline, found: answers by ask; the baseline has at least those of ``found``.
        noise: margins up to here are ties; None if margins are not known.
        margins: baseline answers that have ``top``, if the baseline itself has none.
        sampled: requests whose noise is nobody's promise.
    """
    divergences = []
    for request, answer in found.items():
        position = first_difference(baseline[request], answer)
        if position is not None:
            top = (margins or baseline)[request].top
            one = _divergence(request, position, baseline[request], answer, top, noise)
            divergences.append(replace(one, kind=SAMPLED) if request in sampled else one)
    return Comparison(name, len(found), tuple(divergences))


def compare_logits(
    name: str, baseline: Mapping[str, Answer], found: Mapping[str, Answer]
) -> Comparison:
    """Compare the candidates' log-probabilities of equal prefixes, bit by bit.

    The answers must have ``top``. Positions after a request's first divergence are of other
    contexts and do not count.
    """
    compared = differ = 0
    for request, answer in found.items():
        expected = baseline[request]
        end = first_difference(expected, answer)
        shared = min(len(expected.top), len(answer.top)) if end is None else end + 1
        pairs = list(zip(expected.top[:shared], answer.top[:shared], strict=False))
        compared += len(pairs)
        differ += sum(one != other for one, other in pairs)
    return Comparison(name, len(found), (), compared, differ)


def first_difference(expected: Answer, found: Answer) -> int | None:
    """Index of the first token that differs; the shorter answer's end if it is a beginning."""
    for position, (one, other) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        if one != other:
            return position
    if len(expected.tokens) == len(found.tokens):
        return None
    return min(len(expected.tokens), len(found.tokens))


def differences(
    one: Mapping[str, Answer], other: Mapping[str, Answer], most: int | None = None
) -> Iterator[float]:
    """How far the candidates' log-probabilities of equal contexts lie apart.

    Args:
        one, other: answers with ``top``; ``one`` has at least those of ``other``.
        most: positions of each answer to look at, from the first on; None for all.
    """
    for name, answer in other.items():
        parted = first_difference(one[name], answer)
        end = None if parted is None else parted + 1
        shown = zip(one[name].top[:end], answer.top[:end], strict=False)
        for top, their_top in islice(shown, most):
            known = dict(top)
            yield from (abs(known[token] - p) for token, p in their_top if token in known)


def margin_of(top: TopTwo) -> float | None:
    """Log-probability of the best candidate over the second best."""
    return top[0][1] - top[1][1] if len(top) > 1 else None


def _divergence(
    request: str,
    position: int,
    expected: Answer,
    found: Answer,
    top: tuple[TopTwo, ...],
    noise: float | None,
) -> Divergence:
    margin = margin_of(top[position]) if position < len(top) else None
    window = found.window_at(position)
    draft = None
    if window is not None and position < window.end - 1:
        draft = position - window.first + 1
    return Divergence(
        request,
        position,
        _token(expected, position),
        _token(found, position),
        margin,
        window,
        draft,
        _kind(margin, noise),
    )


def _token(answer: Answer, position: int) -> int | str | None:
    return answer.tokens[position] if position < len(answer.tokens) else None


def _kind(margin: float | None, noise: float | None) -> str:
    if margin is None or noise is None:
        return UNEXPLAINED
    return TIE if margin <= noise else CORRUPTION


REPEATED, TRUNCATED = "repeated fragment", "truncated"
SHORTEST_RUN = 12
LONGEST_PERIOD = 32
MIN_REPEATS = 4
CUT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TextDefect:
    """One sign in one answer that the baseline's does not show.

    Attributes:
        request: the ask's name.
        kind: ``REPEATED`` or ``TRUNCATED``.
        position: index of the token where it begins.
        detail: what was seen, in words.
    """

    request: str
    kind: str
    position: int
    detail: str


def text_defects(request: str, baseline: Answer, found: Answer) -> tuple[TextDefect, ...]:
    """Defects of ``found`` that ``baseline`` does not share."""
    defects = []
    fragment = repeated_fragment(found.tokens)
    if fragment is not None and repeated_fragment(baseline.tokens) is None:
        first, period = fragment
        text = f"from token {first} on, {period} tokens repeat"
        defects.append(TextDefect(request, REPEATED, first, text))
    if len(found.tokens) < CUT_SHARE * len(baseline.tokens):
        text = f"{len(found.tokens)} tokens where the baseline has {len(baseline.tokens)}"
        defects.append(TextDefect(request, TRUNCATED, len(found.tokens), text))
    return tuple(defects)


def repeated_fragment(tokens: Sequence[Hashable]) -> tuple[int, int] | None:
    """Where a fragment begins to repeat, and its length in tokens; None if none does.

    A fragment counts from ``MIN_REPEATS`` repetitions in a row on, ``SHORTEST_RUN`` tokens
    in all at least.
    """
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // MIN_REPEATS) + 1):
        needed = max(period * (MIN_REPEATS - 1), SHORTEST_RUN - period)
        run = 0
        for index in range(period, len(tokens)):
            run = run + 1 if tokens[index] == tokens[index - period] else 0
            if run >= needed:
                return index - run - period + 1, period
    return None

"""Compare two runs of the same requests.

Finds the first divergence of each request and whether a near tie explains it, and signs of
corrupted text: repeated fragments and truncated answers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sametoken.audit.asks import Answer, TopTwo
from sametoken.bench.measure import Window

TIE, CORRUPTION, UNEXPLAINED = "numeric tie", "corruption", "unexplained"
SAMPLED = "sampled otherwise"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a request's answers differ.

    Attributes:
        request: the request's name.
        position: index in the answer.
        expected, found: the tokens there; None past the end of an answer.
        margin: the baseline's log-probability difference between its best and second best
            token there; None if unknown.
        window: the verify step that emitted the found token, if known.
        draft: position of that token among the step's drafts, from 1; None if it was the
            target's own token or the step is unknown.
        kind: ``TIE`` if the margin is within the measured noise, ``CORRUPTION`` if above or if
            the found answer ends in NaN there, ``UNEXPLAINED`` without a margin, ``SAMPLED`` if
            the request is sampled and the server does not guarantee reproducible noise.
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
        name: name of the run.
        num_requests: compared answers.
        divergences: one per request that differs.
        num_logits: positions whose log-probabilities were compared bit by bit.
        num_logits_differ: how many of those positions differ.
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
        """Count the divergences of a kind."""
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
        name: name of ``found``.
        baseline, found: answers by request; the baseline includes all requests of ``found``.
        noise: margins up to this value are ties; None if margins are unknown.
        margins: baseline answers with ``top``, if ``baseline`` has none.
        sampled: sampled requests without a guarantee of reproducible noise.
    """
    divergences = []
    for request, answer in found.items():
        expected = baseline[request]
        position = first_difference(expected, answer)
        if position is None:
            continue
        top = (margins or baseline)[request].top
        margin = margin_of(top[position]) if position < len(top) else None
        tokens = (_token(expected, position), _token(answer, position))
        window, draft, kind = answer.window_at(position), None, _kind(margin, noise)
        if window is not None and position < window.end - 1:
            draft = position - window.first + 1
        if answer.failed and position == len(answer.tokens):
            kind = CORRUPTION
        if request in sampled:
            kind = SAMPLED
        divergences.append(Divergence(request, position, *tokens, margin, window, draft, kind))
    return Comparison(name, len(found), tuple(divergences))


def compare_logits(
    name: str, baseline: Mapping[str, Answer], found: Mapping[str, Answer]
) -> Comparison:
    """Compare the candidates' log-probabilities after equal prefixes, bit by bit.

    The answers must have ``top``. Positions after a request's first divergence have different
    contexts and are not compared.
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
    """Return the index of the first different token, or the end of an answer that is a prefix."""
    for position, (one, other) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        if one != other:
            return position
    if len(expected.tokens) == len(found.tokens):
        return None
    return min(len(expected.tokens), len(found.tokens))


def differences(
    one: Mapping[str, Answer], other: Mapping[str, Answer], most: int | None = None
) -> Iterator[float]:
    """Yield the absolute differences of log-probabilities after equal prefixes.

    A text that two candidates of a position share, as parts of a character do, tells neither.

    Args:
        one, other: answers with ``top``; ``one`` includes all requests of ``other``.
        most: number of leading positions of each answer; None for all.
    """
    for name, answer in other.items():
        divergence = first_difference(one[name], answer)
        end = None if divergence is None else divergence + 1
        shown = zip(one[name].top[:end], answer.top[:end], strict=False)
        for top, their_top in islice(shown, most):
            known, theirs = _told_apart(top), _told_apart(their_top)
            yield from (abs(known[token] - theirs[token]) for token in known.keys() & theirs)


def _told_apart(top: TopTwo) -> dict[int | str, float]:
    """The candidates by token, without those of one text."""
    tokens = [token for token, _ in top]
    return {token: p for token, p in top if tokens.count(token) == 1}


def margin_of(top: TopTwo) -> float | None:
    """Return the log-probability difference between the best and the second best candidate."""
    return top[0][1] - top[1][1] if len(top) > 1 else None


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
    """A sign of corrupted text in one answer that is absent from the baseline's.

    Attributes:
        request: the request's name.
        kind: ``REPEATED`` or ``TRUNCATED``.
        position: index of the token where it begins.
        detail: description.
    """

    request: str
    kind: str
    position: int
    detail: str


def text_defects(request: str, baseline: Answer, found: Answer) -> tuple[TextDefect, ...]:
    """Return the defects of ``found`` that ``baseline`` does not have."""
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
    """Return where a fragment begins to repeat, and its length in tokens; None if none does.

    A fragment counts if it occurs ``MIN_REPEATS`` times in a row and spans ``SHORTEST_RUN``
    tokens.
    """
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // MIN_REPEATS) + 1):
        needed = max(period * (MIN_REPEATS - 1), SHORTEST_RUN - period)
        run = 0
        for index in range(period, len(tokens)):
            run = run + 1 if tokens[index] == tokens[index - period] else 0
            if run >= needed:
                return index - run - period + 1, period
    return None

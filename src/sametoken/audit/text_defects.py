"""Signs of corrupted text: fragments that repeat, and answers cut short."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sametoken.audit.answers import Answer

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

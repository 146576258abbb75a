"""Grammars of texts that come after reasoning, whose tokens they let pass, or count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from sametoken.types.structured_outputs import Grammar, Matcher, Reasoning

_ALL_ALLOWED = -1
_WORD_BITS = 32


class _Place(Enum):
    """Where a completion stands: the one record of whether its reasoning has ended."""

    AT_START = auto()
    IN_REASONING = auto()
    IN_HEADER = auto()
    IN_TEXT = auto()


@dataclass(slots=True)
class MatcherAfterReasoning:
    """A ``Matcher`` whose place moves with the tokens that it accepts, and with nothing else.

    Attributes:
        inner: of the text, at its start until the reasoning has ended. None for any text, in which
            the reasoning may still begin: some models write a line break first.
        reasoning: what comes before the text.
        place: where the completion stands.
        newest: up to ``len(reasoning.end)`` tokens of the reasoning, the last ones.
        num_counted: tokens of the reasoning that its budget counts.
    """

    inner: Matcher | None
    reasoning: Reasoning
    place: _Place
    newest: tuple[int, ...] = ()
    num_counted: int = 0

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        begins = self.place is _Place.AT_START and token_id in self.reasoning.begins
        if begins or self.place in (_Place.IN_REASONING, _Place.IN_HEADER):
            if self._forced() not in (None, token_id):
                return False
            self._take(token_id)
            return True
        if self.inner is None:
            return True
        accepted = self.inner.accept(token_id)
        if accepted:
            self.place = _Place.IN_TEXT
        return accepted

    def copy(self) -> MatcherAfterReasoning:
        """See ``Matcher``."""
        return replace(self, inner=None if self.inner is None else self.inner.copy())

    def fill(self, masks: Any, row: int) -> None:
        """See ``Matcher``."""
        forced = self._forced()
        if forced is not None:
            masks[row] = 0
            allow(masks, row, (forced,))
            return
        if self.inner is None or self.place in (_Place.IN_REASONING, _Place.IN_HEADER):
            masks[row] = _ALL_ALLOWED
            return
        self.inner.fill(masks, row)
        if self.place is _Place.AT_START:
            allow(masks, row, self.reasoning.begins)

    def _forced(self) -> int | None:
        """The only token that may be next, as the budget of the reasoning is spent."""
        end, budget = self.reasoning.end, self.reasoning.budget
        if self.place is not _Place.IN_REASONING or budget is None or self.num_counted < budget:
            return None
        said = self.newest
        return end[max(n for n in range(len(end)) if said[len(said) - n :] == end[:n])]

    def _take(self, token_id: int) -> None:
        """Move on by a token of the reasoning."""
        end, header_end = self.reasoning.end, self.reasoning.header_end
        self.num_counted += bool(self.newest) or token_id not in self.reasoning.begins
        self.newest = (*self.newest, token_id)[-len(end) :]
        if self.newest == end or token_id in self.reasoning.also_ends:
            self.place = _Place.IN_TEXT if header_end is None else _Place.IN_HEADER
        elif self.place is _Place.IN_HEADER and token_id == header_end:
            self.place = _Place.IN_TEXT
        elif self.place is not _Place.IN_HEADER or token_id == end[0]:
            self.place = _Place.IN_REASONING


@dataclass(frozen=True, slots=True)
class GrammarAfterReasoning:
    """The ``Grammar`` of a completion that reasons before its text.

    Attributes:
        text: the grammar of the text; None for any text.
        reasoning: what comes before it.
    """

    text: Grammar | None
    reasoning: Reasoning

    def is_ready(self) -> bool:
        """See ``Grammar``."""
        return self.text is None or self.text.is_ready()

    def prepare(self) -> None:
        """See ``Grammar``.

        Raises:
            SametokenError: as ``text.prepare``.
        """
        if self.text is not None:
            self.text.prepare()

    def new_matcher(self) -> MatcherAfterReasoning:
        """See ``Grammar``."""
        is_undecided = self.reasoning.begins and not self.reasoning.has_begun
        place = _Place.AT_START if is_undecided else _Place.IN_REASONING
        inner = None if self.text is None else self.text.new_matcher()
        return MatcherAfterReasoning(inner, self.reasoning, place)


def allow(masks: Any, row: int, token_ids: Iterable[int]) -> None:
    """Set the bits of tokens in a row of masks, as in ``Matcher.fill``."""
    for token_id in token_ids:
        word, bit = divmod(token_id, _WORD_BITS)
        # The words are signed.
        masks[row, word] |= 1 << bit if bit < _WORD_BITS - 1 else -(1 << bit)

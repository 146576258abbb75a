"""What a parser finds in a model's text.

A parser is a function of the text so far. Its result for a prefix of a text is a prefix of its
result for the text, so a stream of differences adds up to the whole
(``tests/unit/serving/http/test_tool_parsers.py::test_a_stream_adds_up_to_the_whole``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call: the function's name, and the text of its arguments so far."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text: the message content, the calls in order, and the reasoning."""

    content: str
    calls: tuple[FoundCall, ...] = ()
    reasoning: str = ""


#: Maps the text so far, and whether it is finished, to its parts.
Parser = Callable[[str, bool], Parsed]
#: Maps a text to its token ids, without any that a tokenizer adds.
Encode = Callable[[str], tuple[int, ...]]


def parse_nothing(text: str, finished: bool) -> Parsed:
    """For answers without calls: the whole text is content."""
    return Parsed(text)


#: A growing text's calls are parsed again once they have grown by 1/64 of their length.
_REPARSE_DIVISOR = 64


class GrowingText:
    """A text that is parsed as it grows.

    A parser reads the whole text, so parsing at every step would take quadratic time: within calls
    a text is parsed again only after it has grown enough.

    Attributes:
        parsed: what was found so far.
    """

    def __init__(self, parser: Parser) -> None:
        self.parsed = Parsed("")
        self._parser, self._num_parsed = parser, 0

    def read(self, text: str, *, finished: bool) -> Parsed:
        """What is found in the text so far."""
        in_calls = self._num_parsed - len(self.parsed.content) - len(self.parsed.reasoning)
        if finished or len(text) - self._num_parsed >= in_calls // _REPARSE_DIVISOR:
            self._num_parsed = len(text)
            self.parsed = self._parser(text, finished)
        return self.parsed


def with_one_call(parser: Parser) -> Parser:
    """The parser without the calls after the first."""

    def parse(text: str, finished: bool) -> Parsed:
        parsed = parser(text, finished)
        return replace(parsed, calls=parsed.calls[:1])

    return parse


def num_safe(text: str, *marks: str) -> int:
    """Number of leading characters that cannot be part of a mark begun at the text's end."""
    longest = max(map(len, marks))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        rest = text[start:]
        if any(mark.startswith(rest) and mark != rest for mark in marks):
            return start
    return len(text)

"""What a parser finds in a model's text.

A parser is a function of the text so far. Its result for a prefix of a text is a prefix of its
result for the text, so a stream of differences adds up to the whole
(``tests/unit/serving/http/test_tool_parsers.py::test_a_stream_adds_up_to_the_whole``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["content", "reasoning"]


@dataclass(frozen=True, slots=True)
class FoundText:
    """A text of the message or of its reasoning."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call: the function's name, and the text of its arguments so far."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """What the arguments of the newest call have grown by."""

    text: str


#: The arguments of a call without any, as clients can parse them.
NO_ARGUMENTS = "{}"
Part = FoundText | FoundCall
#: A part that begins or goes on.
NewPart = Part | MoreArguments


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text: the message content, the calls in order, and the reasoning.

    Attributes:
        ordered: all parts as they come. Empty: the reasoning, the content and the calls are one
            after the other.
        rest: from where on the text is to be read once it has grown; None: all of it.
    """

    content: str
    calls: tuple[FoundCall, ...] = ()
    reasoning: str = ""
    ordered: tuple[Part, ...] = field(default=(), compare=False, repr=False)
    rest: Rest | None = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts in the order in which they come; no text is empty."""
        if self.ordered:
            return self.ordered
        texts = FoundText("reasoning", self.reasoning), FoundText("content", self.content)
        return (*(one for one in texts if one.text), *self.calls)

    def rest_for(self, parser: Parser) -> Rest:
        """Its rest; of a text that is to be read whole again, all of it by its parser."""
        return self.rest or Rest(0, parser, len(self.parts))


#: Maps the text so far, and whether it is finished, to its parts.
Parser = Callable[[str, bool], Parsed]
#: Maps a text to its token ids, without any that a tokenizer adds.
Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of a text, which alone decides what follows the parts before it.

    Attributes:
        start: its first character.
        parser: of the rest.
        num_parts: parts of the result that are the rest's own.
    """

    start: int
    parser: Parser
    num_parts: int = 0


def parsed_of(parts: Iterable[NewPart], rest: Rest | None = None) -> Parsed:
    """The result that has these parts in this order."""
    ordered: list[Part] = []
    #: Of calls: places, names, and pieces of their arguments.
    calls: list[tuple[int, str, list[str]]] = []
    for part in parts:
        if isinstance(part, MoreArguments):
            calls[-1][2].append(part.text)
            continue
        if isinstance(part, FoundCall):
            calls.append((len(ordered), part.name, [part.arguments]))
        elif not part.text:
            continue
        ordered.append(part)
    for place, name, pieces in calls:
        ordered[place] = FoundCall(name, "".join(pieces))
    texts = [one for one in ordered if isinstance(one, FoundText)]
    return Parsed(
        "".join(one.text for one in texts if one.kind == "content"),
        tuple(one for one in ordered if isinstance(one, FoundCall)),
        "".join(one.text for one in texts if one.kind == "reasoning"),
        tuple(ordered),
        rest,
    )


def parse_nothing(text: str, finished: bool) -> Parsed:
    """For answers without calls: the whole text is content."""
    return Parsed(text, rest=Rest(len(text), parse_nothing))


#: Text that is read again and again is read once it has grown by 1/64 of its length.
_REPARSE_DIVISOR = 64


class GrowingAnswer:
    """An answer's text that is parsed as it grows, in nearly linear time.

    Each time a parser reads only the rest of the text. Where the rest is long, as within calls, it
    waits until the text has grown enough.
    """

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._pieces: list[str] = []
        self._size = self._num_parsed = 0
        #: What was told of the text in ``_pieces``.
        self._told = Parsed("")

    def read(self, piece: str, *, finished: bool) -> list[NewPart]:
        """What is found with one more piece of the text; with ``finished``, the last one."""
        self._pieces.append(piece)
        self._size += len(piece)
        if not finished and self._size - self._num_parsed < self._num_parsed // _REPARSE_DIVISOR:
            return []
        text = "".join(self._pieces)
        parsed = self._parser(text, finished)
        new = _new_parts(self._told, parsed.parts)
        rest = parsed.rest_for(self._parser)
        self._parser, self._pieces = rest.parser, [text[rest.start :]]
        self._size = self._num_parsed = len(text) - rest.start
        self._told = parsed_of(parsed.parts[len(parsed.parts) - rest.num_parts :])
        return new


def _new_parts(told: Parsed, parts: Sequence[Part]) -> list[NewPart]:
    """What was not told yet, in order."""
    left = {"content": len(told.content), "reasoning": len(told.reasoning)}
    num_calls = 0
    new: list[NewPart] = []
    for part in parts:
        if isinstance(part, FoundText):
            size = min(left[part.kind], len(part.text))
            left[part.kind] -= size
            if size < len(part.text):
                new.append(FoundText(part.kind, part.text[size:]))
            continue
        num_calls += 1
        if num_calls > len(told.calls):
            new.append(part)
        elif more := part.arguments[len(told.calls[num_calls - 1].arguments) :]:
            new.append(MoreArguments(more))
    return new


def with_one_call(parser: Parser) -> Parser:
    """The parser without the calls after the first."""
    return _with_calls(parser, 1)


def _with_calls(parser: Parser, most: int) -> Parser:
    def parse(text: str, finished: bool) -> Parsed:
        parsed = parser(text, finished)
        rest = parsed.rest_for(parser)
        end = len(parsed.parts) - rest.num_parts
        before, left = _with_first_calls(parsed.parts[:end], most)
        own, _ = _with_first_calls(parsed.parts[end:], left)
        rest = Rest(rest.start, _with_calls(rest.parser, left), len(own))
        return parsed_of((*before, *own), rest)

    return parse


def _with_first_calls(parts: Iterable[Part], most: int) -> tuple[list[Part], int]:
    """The parts without the calls after some, and how many more of these there could be."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, FoundText):
            found.append(part)
        elif most:
            found.append(part)
            most -= 1
    return found, most


def call_or_text(parser: Parser, mark: str) -> Parser:
    """The parser where an answer begins with a mark; any other is text, whatever it holds."""

    def parse(text: str, finished: bool) -> Parsed:
        if not finished and mark.startswith(text):
            return Parsed("")
        return (parser if text.startswith(mark) else parse_nothing)(text, finished)

    return parse


def num_safe(text: str, *marks: str) -> int:
    """Number of leading characters that cannot be part of a mark begun at the text's end."""
    longest = max(map(len, marks))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        rest = text[start:]
        if any(mark.startswith(rest) and mark != rest for mark in marks):
            return start
    return len(text)

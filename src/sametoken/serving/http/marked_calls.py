"""Calls after marks in a model's text, and the text around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

from sametoken.serving.http.json_spans import skip_space
from sametoken.serving.http.parsed import (
    FoundCall,
    FoundText,
    Parsed,
    Parser,
    Part,
    Rest,
    num_safe,
    parsed_of,
)

START, END = "<tool_call>", "</tool_call>"


class FunctionTags(NamedTuple):
    """The tags of one call, around which those of calls may be missing.

    Attributes:
        opening: what the first begins with.
        name: the pattern of the rest of it, whose group is the function's name.
        close: the last.
    """

    opening: str
    name: str
    close: str


class Syntax(Protocol):
    """How calls are written."""

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """Where the next call begins, mark included, and where what follows its mark does."""
        ...

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """Where what follows the mark ends, where the call does, and whether both are final.

        Args:
            text: the text.
            begun: see ``find_opening``.

        Returns:
            -1 for places that are not there.
        """
        ...

    def calls_in(self, body: str, is_whole: bool) -> Sequence[FoundCall]:
        """The calls in what follows a mark, or in its prefix."""
        ...

    def num_inside(self, text: str) -> int:
        """Number of leading characters that cannot be part of an end begun at the text's end."""
        ...

    def num_outside(self, text: str) -> int:
        """Number of leading characters that cannot be part of a call begun at the text's end."""
        ...


class TagSyntax(NamedTuple):
    """How calls are written between two tags.

    Attributes:
        calls_in: see ``Syntax``, of the text between the tags.
        find: finds the closing tag in a text from a place on, as ``find_outside_strings``.
        starts: opening tags, any of which begins calls.
        end: the closing tag.
        function: of each call, if it has tags.
        bare: functions whose calls may have these alone.
    """

    calls_in: Callable[[str, bool], Sequence[FoundCall]]
    find: Callable[[str, str, int], tuple[int, bool]]
    starts: tuple[str, ...] = (START,)
    end: str = END
    function: FunctionTags | None = None
    bare: Collection[str] = ()

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """See ``Syntax``."""
        for found in _opening(self.starts, self.function).finditer(text, place):
            if found.lastindex is None or found[1] in self.bare:
                return found.span()
        return None

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """See ``Syntax``."""
        start, body = begun
        if self.function is None or body > start:
            end, is_final = self.find(text, self.end, body)
            return end, end + len(self.end) if end >= 0 else -1, is_final
        end, is_final = self.find(text, self.function.close, body)
        if end < 0:
            return -1, -1, is_final
        # The closing tag may be there without the opening one.
        after = end + len(self.function.close)
        tag = skip_space(text, after)
        if text.startswith(self.end, tag):
            return end, tag + len(self.end), is_final
        return end, after, is_final and not self.end.startswith(text[tag : tag + len(self.end)])

    def num_inside(self, text: str) -> int:
        """See ``Syntax``."""
        return num_safe(text, self.end, *(() if self.function is None else (self.function.close,)))

    def num_outside(self, text: str) -> int:
        """See ``Syntax``."""
        if self.function is None:
            return num_safe(text, *self.starts)
        # A text's end that may go on to be a function's tag.
        begun = re.search(rf"{self.function.opening}[^<>\n]*\Z", text)
        return (
            num_safe(text, *self.starts, self.function.opening) if begun is None else begun.start()
        )


@cache
def _opening(starts: tuple[str, ...], function: FunctionTags | None) -> re.Pattern[str]:
    """What begins a call: one of the tags, or without them the function's, which has the name."""
    tags = "|".join(map(re.escape, starts))
    return re.compile(
        tags if function is None else rf"{tags}|(?={function.opening}{function.name})"
    )


def marked_parser(syntax: Syntax, *, follows_call: bool = False) -> Parser:
    """The parser of calls, and of the text around them.

    Args:
        syntax: of the calls.
        follows_call: whether there was a call before the text.
    """
    return partial(_parse_marked, syntax, follows_call)


def _parse_marked(syntax: Syntax, follows_call: bool, text: str, finished: bool) -> Parsed:
    parts: list[Part] = []
    # The text from ``begin`` to ``place`` is content, except spaces before a call.
    begin = place = 0
    while (begun := syntax.find_opening(text, place)) is not None:
        start, body = begun
        end, after, is_final = syntax.find_end(text, begun)
        is_whole = end >= 0 and (is_final or finished)
        safe = len(text) if finished else syntax.num_inside(text)
        known = end if end >= 0 else safe
        calls = syntax.calls_in(text[body:known], is_whole)
        if calls:
            parts += content(text[begin:start].rstrip())
            parts += calls
            if not is_whole:
                rest = marked_parser(syntax, follows_call=follows_call)
                return parsed_of(parts, Rest(start, rest, num_parts=len(calls)))
            follows_call = True
            begin = place = after
        elif not is_whole and not finished:
            place = start
            break
        else:
            place = len(text) if end < 0 else after
    else:
        place = len(text) if finished else max(syntax.num_outside(text), place)
    aside = text[begin:place]
    shown = aside if finished and not follows_call else aside.rstrip()
    rest = marked_parser(syntax, follows_call=follows_call)
    return parsed_of((*parts, *content(shown)), Rest(begin + len(shown), rest))


def content(text: str) -> list[Part]:
    """The part that a text of the message is; none if it is empty."""
    return [FoundText("content", text)] if text else []

"""Calls after marks in a model's text, and the text around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
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
_FUNCTION_TAG, FUNCTION_CLOSE = "<function=", "</function>"
#: What begins a call; its tag may be missing before a function's.
_OPENING = re.compile(rf"{START}|(?={_FUNCTION_TAG}([^<>\n]+)>)")
#: A text's end that may go on to be a function's tag.
_BEGUN_FUNCTION = re.compile(rf"{_FUNCTION_TAG}[^<>\n]*\Z")


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
        read: maps the text between the tags, and whether it is complete, to its calls.
        find: finds the closing tag in a text from a place on, as ``find_outside_strings``.
        bare: functions whose calls may lack the tags.
    """

    read: Callable[[str, bool], Sequence[FoundCall]]
    find: Callable[[str, str, int], tuple[int, bool]]
    bare: Collection[str] = ()

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """See ``Syntax``."""
        for found in _OPENING.finditer(text, place):
            if found[1] is None or found[1] in self.bare:
                return found.span()
        return None

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """See ``Syntax``."""
        start, body = begun
        end, is_final = self.find(text, END if body > start else FUNCTION_CLOSE, body)
        if end < 0 or body > start:
            return end, end + len(END) if end >= 0 else -1, is_final
        # The closing tag may be there without the opening one.
        after = end + len(FUNCTION_CLOSE)
        tag = skip_space(text, after)
        if text.startswith(END, tag):
            return end, tag + len(END), is_final
        return end, after, is_final and not END.startswith(text[tag : tag + len(END)])

    def calls_in(self, body: str, is_whole: bool) -> Sequence[FoundCall]:
        """See ``Syntax``."""
        return self.read(body, is_whole)

    def num_inside(self, text: str) -> int:
        """See ``Syntax``."""
        return num_safe(text, END, FUNCTION_CLOSE)

    def num_outside(self, text: str) -> int:
        """See ``Syntax``."""
        begun = _BEGUN_FUNCTION.search(text)
        return num_safe(text, START, _FUNCTION_TAG) if begun is None else begun.start()


def marked_parser(syntax: Syntax) -> Parser:
    """The parser of a syntax."""

    def parse(text: str, finished: bool) -> Parsed:
        return _parse_marked(text, finished, syntax)

    return parse


def _parse_marked(
    text: str, finished: bool, syntax: Syntax, *, follows_call: bool = False
) -> Parsed:
    """Calls, and the text around them.

    Args:
        text: the text, or its rest.
        finished: whether it is whole.
        syntax: of the calls.
        follows_call: whether there was a call before the text.
    """
    parts: list[Part] = []
    # The text from ``begin`` to ``place`` is content, except spaces before a call.
    begin = place = 0

    def read_rest(text: str, finished: bool) -> Parsed:
        return _parse_marked(text, finished, syntax, follows_call=follows_call)

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
                return parsed_of(parts, Rest(start, read_rest, num_parts=len(calls)))
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
    return parsed_of((*parts, *content(shown)), Rest(begin + len(shown), read_rest))


def content(text: str) -> list[Part]:
    """The part that a text of the message is; none if it is empty."""
    return [FoundText("content", text)] if text else []

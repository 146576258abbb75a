"""Positions of JSON values in a text that may be incomplete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SPACE = " \t\r\n"
_OPENING, _CLOSING = "{[", "}]"
# Possessive quantifiers do not backtrack, so the time is linear in the text.
_STRING = re.compile(r'"(?>[^"\\]|\\.)*+"', re.DOTALL)
_TOKEN = re.compile(rf'{_STRING.pattern}|["{{}}\[\]]', re.DOTALL)
# Followed by what may follow a string in an object or a list.
_WHOLE_STRING = rf"{_STRING.pattern}(?=[{_SPACE}]*+[:,}}\]])"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = rf'{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]'
# What the rest of a text may make another one of, at its end.
_BEGUN = r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z"
_WHOLE_ESCAPES, _ESCAPES = re.compile(_ESCAPE), re.compile(rf"({_BEGUN})|{_ESCAPE}")
_SPACES = re.compile(rf"[{_SPACE}]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_AFTER_SCALAR = re.compile(rf"[,}}\]{_SPACE}]")


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its key, and its value's position.

    Attributes:
        key: the decoded key.
        start: first character of the value.
        end: one past its last character; None while it is incomplete.
    """

    key: str
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """An object, as far as it was parsed.

    Attributes:
        members: in order; only the last one may be incomplete.
        end: one past the closing brace; None while the object is open.
        broken: a syntax error ended the parse.
    """

    members: tuple[Member, ...]
    end: int | None
    broken: bool = False

    def member(self, *keys: str) -> Member | None:
        """The first member with one of these keys."""
        return next((member for member in self.members if member.key in keys), None)


def skip_space(text: str, start: int) -> int:
    """The first position from ``start`` on that holds no white space."""
    found = _SPACES.match(text, start)
    return start if found is None else found.end()


def value_end(text: str, start: int) -> int | None:
    """One past the last character of the value at ``start``; None if it is incomplete.

    Braces and quotes are matched; the text between them is not checked.
    """
    first = text[start : start + 1]
    if first == '"':
        return _string_end(text, start)
    if first in _OPENING and first:
        return _nested_end(text, start)
    found = _AFTER_SCALAR.search(text, start)
    return None if found is None else found.start()


def find_outside_strings(
    text: str, mark: str, start: int, *, ends: bool = False
) -> tuple[int, bool]:
    """Where the first mark outside of strings is, -1 without one, and whether that is final.

    With ``ends`` it is where the object or list at ``start`` has ended, if that comes first.

    Where a string neither ends nor is followed as in JSON, marks from its beginning on count. As
    long as it may still end so, the result is not final.
    """
    scanner = re.compile(rf'{_WHOLE_STRING}|{re.escape(mark)}|["{{}}\[\]]', re.DOTALL)
    depth = 0
    for found in scanner.finditer(text, start):
        place = found.start()
        if found[0] == mark:
            return place, True
        if found[0] == '"':
            end = _string_end(text, place)
            is_final = end is not None and skip_space(text, end) < len(text)
            return text.find(mark, place), is_final
        depth += (found[0] in _OPENING) - (found[0] in _CLOSING)
        if ends and depth == 0:
            return found.end(), True
    return -1, True


def read_object(text: str, start: int) -> ObjectSpan:
    """The members of the object whose opening brace is at ``start``."""
    members: list[Member] = []
    place = skip_space(text, start + 1)
    while place < len(text):
        if text[place] == "}":
            return ObjectSpan(tuple(members), place + 1)
        try:
            if members:
                place = _past(text, place, ",")
            member = _read_member(text, place)
        except ValueError:
            return ObjectSpan(tuple(members), None, broken=True)
        if member is None:
            break
        members.append(member)
        if member.end is None:
            break
        place = skip_space(text, member.end)
    return ObjectSpan(tuple(members), None)


def _read_member(text: str, place: int) -> Member | None:
    """The member at ``place``; None until its value begins.

    Raises:
        ValueError: there is no member.
    """
    if place == len(text):
        return None
    if text[place] != '"':
        raise ValueError(place)
    key_end = _string_end(text, place)
    if key_end is None:
        return None
    colon = skip_space(text, key_end)
    value = _past(text, colon, ":") if colon < len(text) else len(text)
    if value == len(text):
        return None
    return Member(_decoded(text[place:key_end]), value, value_end(text, value))


def _past(text: str, place: int, expected: str) -> int:
    if text[place] != expected:
        raise ValueError(place)
    return skip_space(text, place + 1)


def string_value(text: str, member: Member) -> str | None:
    """The member's value if it is a complete string."""
    if member.end is None or text[member.start] != '"':
        return None
    return _decoded(text[member.start : member.end])


def text_so_far(text: str, member: Member) -> str:
    """What there is of a member's string. What is no escape of JSON is text.

    The result for a prefix of a text is a prefix of its result for the text.
    """

    def character(escape: re.Match[str]) -> str:
        return "" if escape.lastindex else str(json.loads(f'"{escape[0]}"'))

    if member.end is None:
        found = _ESCAPES.sub(character, text[member.start + 1 :])
    else:
        found = _WHOLE_ESCAPES.sub(character, text[member.start + 1 : member.end - 1])
    return _SURROGATE.sub("\ufffd", found)


def scalar(written: str, words: Mapping[str, str]) -> str:
    """A value without quotes as JSON: a number, a word of JSON or one of ``words``; else a text."""
    word = words.get(written, written)
    return word if _SCALAR.fullmatch(word) else json.dumps(written, ensure_ascii=False)


def _decoded(quoted: str) -> str:
    try:
        # Models write control characters without escapes.
        text = str(json.loads(quoted, strict=False))
    except ValueError:
        return quoted[1:-1]
    # Half of a surrogate pair is no character, and cannot be sent.
    return _SURROGATE.sub("\ufffd", text)


def _string_end(text: str, start: int) -> int | None:
    found = _STRING.match(text, start)
    return None if found is None else found.end()


def _nested_end(text: str, start: int) -> int | None:
    depth = 0
    for found in _TOKEN.finditer(text, start):
        token = found[0]
        if token == '"':
            # An incomplete string, which extends to the end of the text.
            return None
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return found.end()
    return None

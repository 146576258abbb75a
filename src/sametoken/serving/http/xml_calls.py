"""Incremental parsers of tool calls that a model writes as XML.

Qwen3-Coder and Qwen3.5 write calls as XML::

    <function=NAME>
    <parameter=NAME>
    VALUE
    </parameter>
    </function>

A value has no quotes and no escapes: it ends at the first ``</parameter>`` that another tag of the
call follows, and the function's JSON Schema decides between text and number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sametoken.serving.http.marked_calls import END, FUNCTION_CLOSE, TagSyntax, parse_marked
from sametoken.serving.http.parsed import FoundCall, Parsed, Parser, num_safe
from sametoken.serving.http.schema_types import STRING, parameter_types, types_of_value

#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_PARAMETER_END = "</parameter>"
_AFTER_VALUE = rf"<parameter=|{FUNCTION_CLOSE}|{END}"
#: A value's end, and one in the whole text of a call. Elsewhere the tag is text of the value.
_VALUE_END = re.compile(rf"{_PARAMETER_END}(?=\s*(?:{_AFTER_VALUE}))")
_LAST_VALUE_END = re.compile(rf"{_PARAMETER_END}(?=\s*(?:{_AFTER_VALUE}|\Z))")
#: What may become a value's end.
_BEGUN_VALUE_END = re.compile(rf"{_PARAMETER_END}\s*(?:<[^<>\s]*)?\Z")
_FUNCTION_END = re.compile(rf"\s*{FUNCTION_CLOSE}")
_LAST_FUNCTION_END = re.compile(rf"\n?{FUNCTION_CLOSE}\s*\Z")
#: The templates write scalars of earlier calls in Python's form.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def qwen3_coder_parser(schemas: Schemas) -> Parser:
    """For ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``.

    The form of Qwen3-Coder and Qwen3.5. A call is reported once its function's name is there. A
    closing tag in a value is text. Before a function of the schemas the outer tag may be missing,
    as Qwen3-Coder sometimes leaves it out (ollama#16686).
    """

    @cache
    def types_of(function: str, parameter: str) -> frozenset[str]:
        return parameter_types(schemas.get(function, {}), parameter)

    def calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
        found = read_call(body, is_whole, types_of)
        return () if found is None else (FoundCall(*found),)

    syntax = TagSyntax(calls_in, _find_outside_values, schemas.keys())

    def parse(text: str, finished: bool) -> Parsed:
        return parse_marked(text, finished, syntax)

    return parse


def read_call(
    body: str, is_whole: bool, types_of: Callable[[str, str], frozenset[str]]
) -> tuple[str, str] | None:
    """The function's name, and its arguments so far as JSON text; None until the name is there.

    Strings grow with the body. The type of any other value is known only at its end.

    Args:
        body: the text between a call's tags, or its prefix.
        is_whole: whether the closing tag is there.
        types_of: JSON Schema's types of a function's parameter.
    """
    head = _FUNCTION.match(body)
    if head is None:
        return None
    members = []
    place = head.end()
    for name, start, end in _parameters(body, place, _LAST_VALUE_END if is_whole else _VALUE_END):
        is_open = end < 0 and not is_whole
        text = body[start : _num_unclosed(body, is_whole) if end < 0 else end].removesuffix("\n")
        value = _value(text, types_of(head[1], name), is_open=is_open)
        if value is not None:
            members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
        if end < 0:
            return head[1], _object(members, is_closed=is_whole)
        place = end + len(_PARAMETER_END)
    is_closed = is_whole or _FUNCTION_END.match(body, place) is not None
    return head[1], _object(members, is_closed=is_closed)


def _num_unclosed(body: str, is_whole: bool) -> int:
    """Number of leading characters of a call that are its own where a value has no end.

    The function's end may have taken the place of the value's (vllm#57699).
    """
    closed = _LAST_FUNCTION_END.search(body)
    if closed is not None:
        return closed.start()
    if is_whole:
        return len(body)
    ended = _BEGUN_VALUE_END.search(body)
    if ended is not None:
        return ended.start()
    return num_safe(body, _PARAMETER_END, FUNCTION_CLOSE, f"\n{FUNCTION_CLOSE}")


def _find_outside_values(text: str, mark: str, start: int) -> tuple[int, bool]:
    """Where the first mark outside of parameters' values is, and whether that is final.

    In a value that has no end, the first mark counts unless the end may still come.
    """
    head = _FUNCTION.match(text, start)
    place = start if head is None else head.end()
    for _, value, end in _parameters(text, place, _VALUE_END):
        if end < 0:
            return text.find(mark, value), False
        place = end + len(_PARAMETER_END)
    return text.find(mark, place), True


def _parameters(
    text: str, place: int, value_end: re.Pattern[str]
) -> Iterator[tuple[str, int, int]]:
    """Names, starts and ends of the consecutive parameters' values; without an end, -1."""
    while opening := _PARAMETER.match(text, place):
        ended = value_end.search(text, opening.end())
        end = -1 if ended is None else ended.start()
        yield opening[1], opening.end(), end
        if end < 0:
            return
        place = end + len(_PARAMETER_END)


def _object(members: list[str], *, is_closed: bool) -> str:
    return "{" + ", ".join(members) + ("}" if is_closed else "")


def _value(text: str, types: frozenset[str], *, is_open: bool) -> str | None:
    """A value as JSON, or a prefix of it; None while its type is unknown."""
    if types == STRING:
        quoted = json.dumps(text, ensure_ascii=False)
        return quoted[:-1] if is_open else quoted
    return None if is_open else _as_json(text, types)


def _as_json(text: str, types: frozenset[str]) -> str:
    """The text if it is JSON that need not be a string; else it as a JSON string."""
    word, quoted = _WORDS.get(text.strip(), text.strip()), json.dumps(text, ensure_ascii=False)
    try:
        found = types_of_value(json.loads(word, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted
    return word if types.isdisjoint(STRING) or found & types else quoted


def _refuse(constant: str) -> Any:
    raise ValueError(constant)

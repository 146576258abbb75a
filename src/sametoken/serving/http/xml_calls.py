"""Incremental parsers of tool calls that a model writes as XML.

Qwen3-Coder and Qwen3.5 write calls as in the first form, GLM-4.5 to 4.7 as in the second, with or
without the line breaks::

    <function=NAME>                 NAME
    <parameter=NAME>                <arg_key>NAME</arg_key>
    VALUE                           <arg_value>VALUE</arg_value>
    </parameter>
    </function>

A value has no quotes and no escapes: it ends at its first closing tag that another tag of the call
follows, and the function's JSON Schema decides between text and number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from sametoken.serving.http.marked_calls import END, FUNCTION_CLOSE, TagSyntax, marked_parser
from sametoken.serving.http.parsed import FoundCall, Parser, num_safe
from sametoken.serving.http.schema_types import STRING, parameter_types, types_of_value

#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION_END = re.compile(rf"\s*{FUNCTION_CLOSE}")
_LAST_FUNCTION_END = re.compile(rf"\n?{FUNCTION_CLOSE}\s*\Z")
#: The templates write scalars of earlier calls in Python's form.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Form(NamedTuple):
    """How a call is written. Of two patterns, the second is for the whole text of a call.

    Attributes:
        heads: what comes before the parameters, with the function's name.
        parameter: what comes before a value, with the parameter's name.
        close: what comes after a value.
        value_ends: a value's end. Elsewhere ``close`` is text of the value.
        begun_value_end: what may become one.
        padding: what parts a value from ``close``.
    """

    heads: tuple[re.Pattern[str], re.Pattern[str]]
    parameter: re.Pattern[str]
    close: str
    value_ends: tuple[re.Pattern[str], re.Pattern[str]]
    begun_value_end: re.Pattern[str]
    padding: str

    @classmethod
    def of(
        cls, heads: tuple[str, str], parameter: str, close: str, following: str, padding: str
    ) -> _Form:
        """A form whose values end where ``following`` comes after ``close``."""
        head, last_head = map(re.compile, heads)
        ends = rf"{close}(?=\s*(?:{following}))", rf"{close}(?=\s*(?:{following}|\Z))"
        value_end, last_value_end = map(re.compile, ends)
        return cls(
            (head, last_head),
            re.compile(parameter),
            close,
            (value_end, last_value_end),
            re.compile(rf"{close}\s*(?:<[^<>\s]*)?\Z"),
            padding,
        )


_QWEN = _Form.of(
    (r"\s*<function=([^<>\n]+)>\s*",) * 2,
    r"\s*<parameter=([^<>\n]+)>\n?",
    "</parameter>",
    rf"<parameter=|{FUNCTION_CLOSE}|{END}",
    padding="\n",
)
_GLM_NAME = r"\s*([^<>{}\s]+)\s*"
_GLM = _Form.of(
    (rf"{_GLM_NAME}(?=<arg_key>)", rf"{_GLM_NAME}(?=<arg_key>|\Z)"),
    # The opening tag of a value may be missing (vllm#49248).
    r"\s*<arg_key>([^<>\n]+)</arg_key>\s*(?:<arg_value>|(?=[^<\s]))",
    "</arg_value>",
    rf"<arg_key>|{END}",
    padding="",
)


def qwen3_coder_parser(schemas: Schemas) -> Parser:
    """For ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``.

    A call is reported once its function's name is there. A closing tag in a value is text. Before
    a function of the schemas the outer tag may be missing, as Qwen3-Coder sometimes leaves it out
    (ollama#16686).
    """
    return _parser(_QWEN, schemas, bare=schemas.keys())


def glm_parser(schemas: Schemas) -> Parser:
    """For ``<tool_call>NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>``.

    A call is reported once its first parameter begins, or without one at its end.
    """
    return _parser(_GLM, schemas)


def _parser(form: _Form, schemas: Schemas, bare: Collection[str] = ()) -> Parser:
    @cache
    def types_of(function: str, parameter: str) -> frozenset[str]:
        return parameter_types(schemas.get(function, {}), parameter)

    def calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
        found = _read_call(form, body, is_whole, types_of)
        return () if found is None else (found,)

    return marked_parser(TagSyntax(calls_in, partial(_find_outside_values, form), bare))


def _read_call(
    form: _Form, body: str, is_whole: bool, types_of: Callable[[str, str], frozenset[str]]
) -> FoundCall | None:
    """A call with its arguments so far; None until the function's name is there.

    Strings grow with the body. The type of any other value is known only at its end.

    Args:
        form: of the call.
        body: the text between a call's tags, or its prefix.
        is_whole: whether the closing tag is there.
        types_of: JSON Schema's types of a function's parameter.
    """
    head = form.heads[is_whole].match(body)
    if head is None:
        return None
    members = []
    place = head.end()
    for name, start, end in _parameters(form, body, place, is_whole):
        is_open = end < 0 and not is_whole
        text = body[start : _num_unclosed(form, body, is_whole) if end < 0 else end]
        value = _value(text.removesuffix(form.padding), types_of(head[1], name), is_open=is_open)
        if value is not None:
            members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
        if end < 0:
            return FoundCall(head[1], _object(members, is_closed=is_whole))
        place = end + len(form.close)
    is_closed = is_whole or _FUNCTION_END.match(body, place) is not None
    return FoundCall(head[1], _object(members, is_closed=is_closed))


def _num_unclosed(form: _Form, body: str, is_whole: bool) -> int:
    """Number of leading characters of a call that are its own where a value has no end.

    The function's end may have taken the place of the value's (vllm#57699).
    """
    closed = _LAST_FUNCTION_END.search(body)
    if closed is not None:
        return closed.start()
    if is_whole:
        return len(body)
    ended = form.begun_value_end.search(body)
    if ended is not None:
        return ended.start()
    return num_safe(body, form.close, FUNCTION_CLOSE, f"\n{FUNCTION_CLOSE}")


def _find_outside_values(form: _Form, text: str, mark: str, start: int) -> tuple[int, bool]:
    """Where the first mark outside of parameters' values is, and whether that is final.

    In a value that has no end, the first mark counts unless the end may still come.
    """
    head = form.heads[False].match(text, start)
    place = start if head is None else head.end()
    for _, value, end in _parameters(form, text, place, is_whole=False):
        if end < 0:
            return text.find(mark, value), False
        place = end + len(form.close)
    return text.find(mark, place), True


def _parameters(
    form: _Form, text: str, place: int, is_whole: bool
) -> Iterator[tuple[str, int, int]]:
    """Names, starts and ends of the consecutive parameters' values; without an end, -1."""
    while opening := form.parameter.match(text, place):
        ended = form.value_ends[is_whole].search(text, opening.end())
        end = -1 if ended is None else ended.start()
        yield opening[1], opening.end(), end
        if end < 0:
            return
        place = end + len(form.close)


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

"""Incremental parsers of tool calls in a model's text.

Qwen3-Coder and Qwen3.5 write calls as XML::

    <function=NAME>
    <parameter=NAME>
    VALUE
    </parameter>
    </function>

A value has no quotes and no escapes: the function's JSON Schema decides between text and number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from sametoken.serving.http.harmony import TEMPLATE_MARK, parse_harmony
from sametoken.serving.http.json_spans import (
    Member,
    ObjectSpan,
    read_object,
    skip_space,
    string_value,
)
from sametoken.serving.http.parsed import (
    FoundCall,
    FoundText,
    Parsed,
    Parser,
    Part,
    Rest,
    num_safe,
    parse_nothing,
    parsed_of,
)

#: Maps the text between a call's tags, and whether it is complete, to the call.
_CallReader = Callable[[str, bool], FoundCall | None]

_START, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_SEPARATORS = ";, \t\r\n"


def parse_hermes(text: str, finished: bool) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with text around them.

    The form of Hermes and of Qwen's templates. A call is reported once its name and the first
    character of its arguments are there; otherwise the text between the tags is content.
    """
    return _parse_marked(text, finished, _call_in)


def qwen3_coder_parser(schemas: Schemas) -> Parser:
    """For ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``.

    The form of Qwen3-Coder and Qwen3.5. A call is reported once its function's name is there.
    """

    def call_in(body: str, is_whole: bool) -> FoundCall | None:
        found = read_call(body, is_whole, schemas)
        return None if found is None else FoundCall(*found)

    def parse(text: str, finished: bool) -> Parsed:
        return _parse_marked(text, finished, call_in)

    return parse


def _parse_marked(
    text: str, finished: bool, call_in: _CallReader, *, follows_call: bool = False
) -> Parsed:
    """Calls between tags, and the text around them.

    Args:
        text: the text, or its rest.
        finished: whether it is whole.
        call_in: reads what is between the tags.
        follows_call: whether there was a call before the text.
    """
    parts: list[Part] = []
    # The text from ``begin`` to ``place`` is content, except spaces before a call.
    begin = place = 0

    def read_rest(text: str, finished: bool) -> Parsed:
        return _parse_marked(text, finished, call_in, follows_call=follows_call)

    while (start := text.find(_START, place)) >= 0:
        body = start + len(_START)
        end = text.find(_END, body)
        known = end if end >= 0 else len(text) if finished else num_safe(text, _END)
        call = call_in(text[body:known], end >= 0)
        if call is not None:
            parts += _content(text[begin:start].rstrip())
            parts.append(call)
            if end < 0:
                return parsed_of(parts, Rest(start, read_rest, num_parts=1))
            follows_call = True
            begin = place = end + len(_END)
        elif end < 0 and not finished:
            place = start
            break
        else:
            place = len(text) if end < 0 else end + len(_END)
    else:
        place = len(text) if finished else max(num_safe(text, _START), place)
    aside = text[begin:place]
    shown = aside if finished and not follows_call else aside.rstrip()
    return parsed_of((*parts, *_content(shown)), Rest(begin + len(shown), read_rest))


def _content(text: str) -> list[Part]:
    return [FoundText("content", text)] if text else []


def parse_llama3_json(text: str, finished: bool) -> Parsed:
    """``{"name": ..., "parameters": {...}}``, alone or several with ``;`` between them.

    Llama 3's form. Calls are at the start, after an optional ``<|python_tag|>``; any other object
    or text is content.
    """
    start = skip_space(text, 0)
    if not finished and _PYTHON_TAG.startswith(text[start:]):
        return Parsed("")
    place = start
    if text.startswith(_PYTHON_TAG, start):
        place = skip_space(text, start + len(_PYTHON_TAG))
    calls, place = _consecutive_calls(text, place)
    rest = text[place:].rstrip() if calls else text
    begins = text[place : place + 1]
    undecided = not begins or (begins == "{" and _may_become_call(read_object(text, place)))
    if undecided:
        return parsed_of((*calls, *_content(rest if finished else "")))
    start = place + len(rest) if calls else len(text)
    follows = _parse_stripped if calls else parse_nothing
    return parsed_of((*calls, *_content(rest)), Rest(start, follows))


def _parse_stripped(text: str, finished: bool) -> Parsed:
    """Content without the spaces at its end."""
    shown = text.rstrip()
    return Parsed(shown, rest=Rest(len(shown), _parse_stripped))


def parse_required(text: str, finished: bool) -> Parsed:
    """``[{"name": ..., "parameters": {...}}, ...]``, the constraint of forced calls."""
    calls, _ = _consecutive_calls(text, skip_space(text, skip_space(text, 0) + 1))
    return Parsed("", calls)


def named_parser(name: str) -> Parser:
    """For an answer that consists of the arguments of one function."""

    def parse(text: str, finished: bool) -> Parsed:
        return Parsed("", (FoundCall(name, text),))

    return parse


#: Makes the parser for given tools, by the values of ``--tool-call-parser``.
TOOL_PARSERS: Mapping[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: parse_hermes,
    "llama3_json": lambda _: parse_llama3_json,
    "openai": lambda _: parse_harmony,
    "qwen3_coder": qwen3_coder_parser,
}


def parser_of_template(template: str) -> str | None:
    """The parser for a chat template's syntax of calls; None if it is unknown."""
    if TEMPLATE_MARK in template:
        return "openai"
    if _START in template:
        # Qwen3.5 and Qwen3-Coder put XML between the same tags.
        return "qwen3_coder" if "<function=" in template else "hermes"
    if _PYTHON_TAG in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None


def _consecutive_calls(text: str, place: int) -> tuple[tuple[FoundCall, ...], int]:
    """The consecutive calls from ``place`` on, and where they end."""
    calls: list[FoundCall] = []
    while text[place : place + 1] == "{":
        span = read_object(text, place)
        call = _call(text, span)
        if call is None:
            break
        calls.append(call)
        place = len(text) if span.end is None else span.end
        while text[place : place + 1] and text[place] in _SEPARATORS:
            place += 1
    return tuple(calls), place


def _call_in(body: str, is_whole: bool) -> FoundCall | None:
    """The call between tags, whose arguments may be missing."""
    start = skip_space(body, 0)
    if body[start : start + 1] != "{":
        return None
    span = read_object(body, start)
    call = _call(body, span)
    name = span.member("name")
    if call is None and span.end is not None and name is not None:
        called = string_value(body, name)
        return FoundCall(called, "{}") if called else None
    return call


def _call(text: str, span: ObjectSpan) -> FoundCall | None:
    """The call of an object, once its name and some of its arguments are there."""
    name_member, arguments = span.member("name"), span.member(*_ARGUMENTS)
    if name_member is None or arguments is None:
        return None
    name = string_value(text, name_member)
    return FoundCall(name, _arguments(text, arguments)) if name else None


def _arguments(text: str, member: Member) -> str:
    """The arguments so far; some models write them as a JSON string."""
    if text[member.start] == '"':
        return string_value(text, member) or ""
    return text[member.start : member.end]


def _may_become_call(span: ObjectSpan) -> bool:
    keys = {member.key for member in span.members}
    return span.end is None and not span.broken and keys <= _KEYS


#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = "</parameter>"
_FUNCTION_END = re.compile(r"\s*</function>")
#: The templates write scalars of earlier calls in Python's form.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    NoneType: frozenset({"null"}),
}


def read_call(body: str, is_whole: bool, schemas: Schemas) -> tuple[str, str] | None:
    """The function's name, and its arguments so far as JSON text; None until the name is there.

    Strings grow with the body. The type of any other value is known only at its end.

    Args:
        body: the text between a call's tags, or its prefix.
        is_whole: whether the closing tag is there.
        schemas: of all functions.
    """
    head = _FUNCTION.match(body)
    if head is None:
        return None
    properties = schemas.get(head[1], {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    members = []
    place = head.end()
    while opening := _PARAMETER.match(body, place):
        start, end = opening.end(), body.find(_PARAMETER_END, opening.end())
        is_open = end < 0 and not is_whole
        shown = num_safe(body, _PARAMETER_END) if is_open else len(body) if end < 0 else end
        text = body[start:shown].removesuffix("\n")
        value = _value(text, properties.get(opening[1], {"type": "string"}), is_open=is_open)
        if value is not None:
            members.append(f"{json.dumps(opening[1], ensure_ascii=False)}: {value}")
        if end < 0:
            return head[1], _object(members, is_closed=is_whole)
        place = end + len(_PARAMETER_END)
    is_closed = is_whole or _FUNCTION_END.match(body, place) is not None
    return head[1], _object(members, is_closed=is_closed)


def _object(members: list[str], *, is_closed: bool) -> str:
    return "{" + ", ".join(members) + ("}" if is_closed else "")


def _value(text: str, schema: Any, *, is_open: bool) -> str | None:
    """A value as JSON, or a prefix of it; None while its type is unknown."""
    named = schema.get("type") if isinstance(schema, dict) else None
    if named == "string":
        quoted = json.dumps(text, ensure_ascii=False)
        return quoted[:-1] if is_open else quoted
    return None if is_open else _as_json(text, named)


def _as_json(text: str, named: Any) -> str:
    """The text if it is JSON of an allowed type, else the text as a JSON string."""
    word = _WORDS.get(text.strip(), text.strip())
    try:
        kinds = _KINDS[type(json.loads(word, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        kinds = frozenset()
    allowed = not isinstance(named, list) or any(kind in named for kind in kinds)
    return word if kinds and allowed else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)

"""Incremental parsers of tool calls in a model's text.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sametoken.serving.http.harmony import CHANNEL, TEMPLATE_MARK, parse_harmony
from sametoken.serving.http.json_spans import (
    Member,
    ObjectSpan,
    find_outside_strings,
    read_object,
    skip_space,
    string_value,
)
from sametoken.serving.http.parsed import (
    NO_ARGUMENTS,
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
from sametoken.serving.http.schema_types import STRING, parameter_types, types_of_value


class CallSyntax(NamedTuple):
    """How a model writes calls.

    Attributes:
        parser: of answers with calls.
        mark: what begins an answer of calls, where other answers may have a constraint; None if
            none may.
        is_constrained: whether the mark is in what a grammar constrains.
    """

    parser: Parser
    mark: str | None = None
    is_constrained: bool = True


class _Syntax(NamedTuple):
    """How calls are written between two tags.

    Attributes:
        calls_in: maps the text between the tags, and whether it is complete, to its calls.
        find: finds the closing tag in a text from a place on, as ``find_outside_strings``.
        bare: functions whose calls may lack the tags.
    """

    calls_in: Callable[[str, bool], Sequence[FoundCall]]
    find: Callable[[str, str, int], tuple[int, bool]]
    bare: Collection[str] = ()

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """Where the next call begins, tag included, and where what is in its tags begins."""
        for found in _OPENING.finditer(text, place):
            if found[1] is None or found[1] in self.bare:
                return found.span()
        return None

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """Where what is in the tags ends, where the call does, and whether both are final.

        Args:
            text: the text.
            begun: see ``find_opening``.

        Returns:
            -1 for places that are not there.
        """
        start, body = begun
        end, is_final = self.find(text, _END if body > start else _FUNCTION_CLOSE, body)
        if end < 0 or body > start:
            return end, end + len(_END) if end >= 0 else -1, is_final
        # The closing tag may be there without the opening one.
        after = end + len(_FUNCTION_CLOSE)
        tag = skip_space(text, after)
        if text.startswith(_END, tag):
            return end, tag + len(_END), is_final
        return end, after, is_final and not _END.startswith(text[tag : tag + len(_END)])


_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION_TAG, _FUNCTION_CLOSE = "<function=", "</function>"
#: What begins a call; its tag may be missing before a function's.
_OPENING = re.compile(rf"{_START}|(?={_FUNCTION_TAG}([^<>\n]+)>)")
#: A text's end that may go on to be a function's tag.
_BEGUN_FUNCTION = re.compile(rf"{_FUNCTION_TAG}[^<>\n]*\Z")
#: What parsers must see, special tokens or not; Llama's tag may be missing.
CALL_MARKS = (_START, _END)
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_SEPARATORS = ";, \t\r\n"
_NULL = "null"


def parse_hermes(text: str, finished: bool) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with text around them.

    The form of Hermes and of Qwen's templates. A call is reported once its name and the first
    character of its arguments are there; otherwise the text between the tags is content. Between
    two tags there may be several. A closing tag in a string of an argument is text.
    """
    return _parse_marked(text, finished, _Syntax(_calls_in, find_outside_strings))


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

    syntax = _Syntax(calls_in, _find_outside_values, schemas.keys())

    def parse(text: str, finished: bool) -> Parsed:
        return _parse_marked(text, finished, syntax)

    return parse


def _parse_marked(
    text: str, finished: bool, syntax: _Syntax, *, follows_call: bool = False
) -> Parsed:
    """Calls between tags, and the text around them.

    Args:
        text: the text, or its rest.
        finished: whether it is whole.
        syntax: of what is between the tags.
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
        safe = len(text) if finished else num_safe(text, _END, _FUNCTION_CLOSE)
        known = end if end >= 0 else safe
        calls = syntax.calls_in(text[body:known], is_whole)
        if calls:
            parts += _content(text[begin:start].rstrip())
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
        place = len(text) if finished else max(_num_content(text), place)
    aside = text[begin:place]
    shown = aside if finished and not follows_call else aside.rstrip()
    return parsed_of((*parts, *_content(shown)), Rest(begin + len(shown), read_rest))


def _num_content(text: str) -> int:
    """Number of leading characters that cannot be part of a call begun at the text's end."""
    begun = _BEGUN_FUNCTION.search(text)
    return num_safe(text, _START, _FUNCTION_TAG) if begun is None else begun.start()


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
#: What a call begins with, by the values of ``--tool-call-parser``. Llama's calls are mere JSON.
FIRST_MARKS: Mapping[str, str] = {"hermes": _START, "openai": CHANNEL, "qwen3_coder": _START}


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


def _consecutive_calls(
    text: str, place: int, *, needs_arguments: bool = True
) -> tuple[tuple[FoundCall, ...], int]:
    """The consecutive calls from ``place`` on, and where they end."""
    calls: list[FoundCall] = []
    while text[place : place + 1] == "{":
        span = read_object(text, place)
        call = _call(text, span, needs_arguments=needs_arguments)
        if call is None:
            break
        calls.append(call)
        place = len(text) if span.end is None else span.end
        while text[place : place + 1] and text[place] in _SEPARATORS:
            place += 1
    return tuple(calls), place


def _calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
    """The calls between tags, whose arguments may be missing."""
    calls, _ = _consecutive_calls(body, skip_space(body, 0), needs_arguments=False)
    return calls


def _call(text: str, span: ObjectSpan, *, needs_arguments: bool) -> FoundCall | None:
    """The call of an object, once its name and some of its arguments are there.

    Without ``needs_arguments`` a whole object may lack them.
    """
    name_member, arguments = span.member("name"), span.member(*_ARGUMENTS)
    lacks_arguments = arguments is None and (needs_arguments or span.end is None)
    if name_member is None or lacks_arguments:
        return None
    name = string_value(text, name_member)
    return FoundCall(name, _arguments(text, arguments)) if name else None


def _arguments(text: str, member: Member | None) -> str:
    """The arguments so far; some models write them as a JSON string, and none as null."""
    if member is None:
        return NO_ARGUMENTS
    if text[member.start] == '"':
        return string_value(text, member) or ("" if member.end is None else NO_ARGUMENTS)
    written = text[member.start : member.end]
    if not _NULL.startswith(written):
        return written
    return "" if member.end is None else NO_ARGUMENTS


def _may_become_call(span: ObjectSpan) -> bool:
    keys = {member.key for member in span.members}
    return span.end is None and not span.broken and keys <= _KEYS


#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_PARAMETER_END = "</parameter>"
_AFTER_VALUE = rf"<parameter=|{_FUNCTION_CLOSE}|{_END}"
#: A value's end, and one in the whole text of a call. Elsewhere the tag is text of the value.
_VALUE_END = re.compile(rf"{_PARAMETER_END}(?=\s*(?:{_AFTER_VALUE}))")
_LAST_VALUE_END = re.compile(rf"{_PARAMETER_END}(?=\s*(?:{_AFTER_VALUE}|\Z))")
#: What may become a value's end.
_BEGUN_VALUE_END = re.compile(rf"{_PARAMETER_END}\s*(?:<[^<>\s]*)?\Z")
_FUNCTION_END = re.compile(rf"\s*{_FUNCTION_CLOSE}")
_LAST_FUNCTION_END = re.compile(rf"\n?{_FUNCTION_CLOSE}\s*\Z")
#: The templates write scalars of earlier calls in Python's form.
_WORDS = {"True": "true", "False": "false", "None": "null"}


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
    return num_safe(body, _PARAMETER_END, _FUNCTION_CLOSE, f"\n{_FUNCTION_CLOSE}")


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

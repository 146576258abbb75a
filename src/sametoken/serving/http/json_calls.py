"""Incremental parsers of tool calls that a model writes as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.serving.http.json_spans import (
    Member,
    ObjectSpan,
    find_outside_strings,
    read_object,
    skip_space,
    string_value,
    value_end,
)
from sametoken.serving.http.marked_calls import START, TagSyntax, content, marked_parser
from sametoken.serving.http.parsed import (
    NO_ARGUMENTS,
    FoundCall,
    Parsed,
    Rest,
    parse_nothing,
    parsed_of,
)

PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_SEPARATORS = ";, \t\r\n"
_NULL = "null"
#: What Markdown puts around code.
FENCE = "```"


def parse_llama3_json(text: str, finished: bool) -> Parsed:
    """``{"name": ..., "parameters": {...}}``, alone or several with ``;`` between them.

    Llama 3's form. Calls are at the start, after an optional ``<|python_tag|>``; any other object
    or text is content.
    """
    start = skip_space(text, 0)
    if not finished and PYTHON_TAG.startswith(text[start:]):
        return Parsed("")
    place = start
    if text.startswith(PYTHON_TAG, start):
        place = skip_space(text, start + len(PYTHON_TAG))
    calls, place = _consecutive_calls(text, place)
    rest = text[place:].rstrip() if calls else text
    begins = text[place : place + 1]
    undecided = not begins or (begins == "{" and _may_become_call(read_object(text, place)))
    if undecided:
        return parsed_of((*calls, *content(rest if finished else "")))
    start = place + len(rest) if calls else len(text)
    follows = _parse_stripped if calls else parse_nothing
    return parsed_of((*calls, *content(rest)), Rest(start, follows))


def _parse_stripped(text: str, finished: bool) -> Parsed:
    """Content without the spaces at its end."""
    shown = text.rstrip()
    return Parsed(shown, rest=Rest(len(shown), _parse_stripped))


def calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
    """The consecutive calls at the beginning of a text, whose arguments may be missing.

    They may be in a list.
    """
    place = skip_space(body, 0)
    if body[place : place + 1] == "[":
        place = skip_space(body, place + 1)
    calls, _ = _consecutive_calls(body, place, needs_arguments=False)
    return calls


def parse_required(text: str, finished: bool) -> Parsed:
    """``[{"name": ..., "parameters": {...}}, ...]``, the constraint of forced calls."""
    return Parsed("", tuple(calls_in(text, finished)))


#: For ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with text around them.
#:
#: The form of Hermes and of Qwen's, Granite 4's and ERNIE's templates. A call is reported once its
#: name and the first character of its arguments are there; otherwise the text between the tags is
#: content. Between two tags there may be several. A closing tag in a string of an argument is text.
parse_hermes = marked_parser(TagSyntax(calls_in, find_outside_strings))
HUNYUAN_TAGS = ("<tool_calls>", "</tool_calls>")
#: For ``<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>``.
parse_hunyuan = marked_parser(
    TagSyntax(calls_in, find_outside_strings, HUNYUAN_TAGS[:1], HUNYUAN_TAGS[1])
)
GRANITE_MARKS = ("<|tool_call|>", "<|end_of_text|>")
#: For ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`` up to the message's end.
#:
#: The form of Granite 3, which may write the first mark without its bars.
parse_granite = marked_parser(
    TagSyntax(calls_in, find_outside_strings, (GRANITE_MARKS[0], START), GRANITE_MARKS[1])
)


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


def arguments_at(text: str, place: int, is_whole: bool) -> str:
    """The arguments so far that begin at a place; none are an empty object.

    A fence may follow them.
    """
    if text[place : place + 1] in ("{", '"'):
        return _arguments(text, Member("", place, value_end(text, place)))
    written = text[place:].removesuffix(FENCE).strip()
    if not is_whole:
        return ""
    return NO_ARGUMENTS if written in ("", _NULL) else written


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

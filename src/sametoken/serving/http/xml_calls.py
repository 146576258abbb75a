"""Incremental parsers of tool calls that a model writes as XML.

Qwen3-Coder, Qwen3.5 and Seed-OSS write calls as in the first form, MiniMax-M2 as in the second,
GLM-4.5 to 4.7 as in the third, with or without the line breaks::

    <function=NAME>                 <invoke name="NAME">            NAME
    <parameter=NAME>                <parameter name="NAME">         <arg_key>NAME</arg_key>
    VALUE                           VALUE                           <arg_value>VALUE</arg_value>
    </parameter>                    </parameter>
    </function>                     </invoke>

In the first two there may be several between a pair of the tags around calls. A value has no
quotes and no escapes: it ends at its first closing tag that another tag of the call follows, and
the function's JSON Schema decides between text and number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from sametoken.serving.http.json_spans import skip_space
from sametoken.serving.http.marked_calls import END, START, FunctionTags, TagSyntax, marked_parser
from sametoken.serving.http.parsed import FoundCall, Parser, num_safe
from sametoken.serving.http.schema_types import STRING, parameter_types, types_of_value

#: The JSON Schema of each function's parameters, by the function's name.
Schemas = Mapping[str, Mapping[str, Any]]

SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
MINIMAX_TAGS = ("<minimax:tool_call>", "</minimax:tool_call>")
#: The templates write scalars of earlier calls in Python's form.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Form(NamedTuple):
    """How a call is written. Of two patterns, the second is for the whole text of a call.

    Attributes:
        tags: around calls.
        heads: what comes before the parameters, with the function's name.
        parameter: what comes before a value, with the parameter's name.
        close: what comes after a value.
        value_ends: a value's end. Elsewhere ``close`` is text of the value.
        begun_value_end: what may become one.
        padding: what parts a value from ``close``.
        function: of a call, if it has tags.
    """

    tags: tuple[str, str]
    heads: tuple[re.Pattern[str], re.Pattern[str]]
    parameter: re.Pattern[str]
    close: str
    value_ends: tuple[re.Pattern[str], re.Pattern[str]]
    begun_value_end: re.Pattern[str]
    padding: str
    function: FunctionTags | None = None

    @classmethod
    def of(
        cls,
        tags: tuple[str, str],
        heads: tuple[str, str],
        parameter: tuple[str, str],
        close: str,
        padding: str,
        function: FunctionTags | None = None,
    ) -> _Form:
        """A form. A parameter has what its tag begins with, and the pattern of the rest."""
        head, last_head = map(re.compile, heads)
        closes = (tags[1],) if function is None else (tags[1], function.close)
        following = "|".join((parameter[0], *closes))
        ends = rf"{close}(?=\s*(?:{following}))", rf"{close}(?=\s*(?:{following}|\Z))"
        value_end, last_value_end = map(re.compile, ends)
        return cls(
            tags,
            (head, last_head),
            re.compile(rf"\s*{parameter[0]}{parameter[1]}"),
            close,
            (value_end, last_value_end),
            re.compile(rf"{close}\s*(?:<[^<>\s]*(?: [^<>\s]*)?)?\Z"),
            padding,
            function,
        )

    @classmethod
    def with_functions(
        cls, tags: tuple[str, str], function: FunctionTags, parameter: tuple[str, str], padding: str
    ) -> _Form:
        """A form in which each call has tags."""
        head = rf"\s*{function.opening}{function.name}\s*"
        return cls.of(tags, (head, head), parameter, "</parameter>", padding, function)

    def end_of_function(self, text: str, place: int) -> int:
        """Where the closing tag of a call ends that a place begins with; -1 without one."""
        if self.function is None:
            return -1
        tag = skip_space(text, place)
        return tag + len(self.function.close) if text.startswith(self.function.close, tag) else -1


_FUNCTION = FunctionTags("<function=", r"([^<>\n]+)>", "</function>")
_PARAMETER = ("<parameter=", r"([^<>\n]+)>\n?")
_QWEN = _Form.with_functions((START, END), _FUNCTION, _PARAMETER, padding="\n")
_SEED = _Form.with_functions(SEED_TAGS, _FUNCTION, _PARAMETER, padding="\n")
# The quotes may be others, or missing.
_NAME = r"[\"']?([^<>\"'\n]+)[\"']?>"
_MINIMAX = _Form.with_functions(
    MINIMAX_TAGS,
    FunctionTags("<invoke name=", _NAME, "</invoke>"),
    ("<parameter name=", _NAME),
    padding="",
)
_GLM_NAME = r"\s*([^<>{}\s]+)\s*"
_GLM = _Form.of(
    (START, END),
    (rf"{_GLM_NAME}(?=<arg_key>)", rf"{_GLM_NAME}(?=<arg_key>|\Z)"),
    # The opening tag of a value may be missing (vllm#49248).
    ("<arg_key>", r"([^<>\n]+)</arg_key>\s*(?:<arg_value>|(?=[^<\s]))"),
    "</arg_value>",
    padding="",
)


def _parser(form: _Form, schemas: Schemas) -> Parser:
    @cache
    def types_of(function: str, parameter: str) -> frozenset[str]:
        return parameter_types(schemas.get(function, {}), parameter)

    def calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
        calls, place = list[FoundCall](), 0
        while place >= 0 and (head := form.heads[is_whole].match(body, place)) is not None:
            call, place = _read_call(form, body, head, is_whole, types_of)
            calls.append(call)
        return calls

    find = partial(_find_outside_values, form)
    start, end = form.tags
    return marked_parser(TagSyntax(calls_in, find, (start,), end, form.function, schemas.keys()))


#: For ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``.
#:
#: A call is reported once its function's name is there. A closing tag in a value is text. Before
#: a function of the schemas the outer tag may be missing, as Qwen3-Coder sometimes leaves it out
#: (ollama#16686).
qwen3_coder_parser = partial(_parser, _QWEN)
#: For the same with Seed's own tags around.
seed_oss_parser = partial(_parser, _SEED)
#: Likewise for MiniMax-M2's tags. Values have no line breaks around them.
minimax_m2_parser = partial(_parser, _MINIMAX)
#: For ``<tool_call>NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>``.
#:
#: A call is reported once its first parameter begins, or without one at its end.
glm_parser = partial(_parser, _GLM)


def _read_call(
    form: _Form,
    body: str,
    head: re.Match[str],
    is_whole: bool,
    types_of: Callable[[str, str], frozenset[str]],
) -> tuple[FoundCall, int]:
    """A call with its arguments so far, and where it ends; -1 if nothing can follow it.

    Strings grow with the body. The type of any other value is known only at its end.

    Args:
        form: of the call.
        body: the text between the tags around calls, or its prefix.
        head: of the call.
        is_whole: whether the closing tag is there.
        types_of: JSON Schema's types of a function's parameter.
    """
    members = []
    place = head.end()
    for name, start, end in _parameters(form, body, place, is_whole):
        is_open = end < 0 and not is_whole
        text = body[start : _num_unclosed(form, body, is_whole) if end < 0 else end]
        value = _value(text.removesuffix(form.padding), types_of(head[1], name), is_open=is_open)
        if value is not None:
            members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
        if end < 0:
            return FoundCall(head[1], _object(members, is_closed=is_whole)), -1
        place = end + len(form.close)
    end = form.end_of_function(body, place)
    return FoundCall(head[1], _object(members, is_closed=is_whole or end >= 0)), end


def _num_unclosed(form: _Form, body: str, is_whole: bool) -> int:
    """Number of leading characters of a call that are its own where a value has no end.

    The function's end may have taken the place of the value's (vllm#57699).
    """
    close = None if form.function is None else form.function.close
    trimmed = body.rstrip()
    if close is not None and trimmed.endswith(close):
        return len(trimmed.removesuffix(close).removesuffix("\n"))
    if is_whole:
        return len(body)
    ended = form.begun_value_end.search(body)
    if ended is not None:
        return ended.start()
    return num_safe(body, form.close, *(() if close is None else (close, f"\n{close}")))


def _find_outside_values(form: _Form, text: str, mark: str, start: int) -> tuple[int, bool]:
    """Where the first mark outside of parameters' values is, and whether that is final.

    In a value that has no end, the first mark counts unless the end may still come.
    """
    place = start
    while (head := form.heads[False].match(text, place)) is not None:
        place = head.end()
        for _, value, end in _parameters(form, text, place, is_whole=False):
            if end < 0:
                return text.find(mark, value), False
            place = end + len(form.close)
        after = form.end_of_function(text, place)
        if after < 0 or mark != form.tags[1]:
            break
        place = after
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

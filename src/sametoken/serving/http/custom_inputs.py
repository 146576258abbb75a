"""The texts that custom tools take, in calls of functions with a text as their one argument."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

from sametoken.serving.http.json_spans import read_object, text_so_far
from sametoken.serving.http.parsed import FoundCall, Parsed, Parser, Part, parsed_of

#: The function's argument.
INPUT = "input"


def input_arguments(text: str) -> str:
    """The arguments of a call with a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def with_inputs(parser: Parser, names: Collection[str]) -> Parser:
    """The parser with texts for arguments in calls of these tools."""

    def of_input(part: Part) -> Part:
        if isinstance(part, FoundCall) and part.name in names:
            return FoundCall(part.name, _input_in(part.arguments))
        return part

    def parse(text: str, finished: bool) -> Parsed:
        parsed = parser(text, finished)
        rest = parsed.rest_for(parser)
        rest = replace(rest, parser=with_inputs(rest.parser, names))
        return parsed_of(map(of_input, parsed.parts), rest)

    return parse


def _input_in(arguments: str) -> str:
    """The text in arguments so far. What has another form is itself the text."""
    if not arguments.startswith("{"):
        return arguments
    span = read_object(arguments, 0)
    member = span.member(INPUT)
    if member is not None and arguments[member.start] == '"':
        return text_so_far(arguments, member)
    is_other = span.broken or (span.end is not None and span.members)
    return arguments if is_other else ""

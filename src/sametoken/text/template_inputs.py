"""Conversations in the form that a chat template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = Sequence[Mapping[str, Any]]
_SYSTEM, _USER, _ASSISTANT, _TOOL = "system", "user", "assistant", "tool"
#: OpenAI's role of an application's instructions, and how a template compares with it.
_DEVELOPER = "developer"
_KNOWS_DEVELOPERS = re.compile(rf"""["']{_DEVELOPER}["']""")
#: How a template joins a call's arguments to a text, which must be one too.
_JOINS_ARGUMENTS = re.compile(
    r"""\+\s*[\w.\[\]'"]+(?:\[["']|\.)arguments(?:["']\])?\s*(?:\+|-?}})"""
)
#: How a template reads the first of a message's calls alone.
_READS_ONE_CALL = re.compile(r"tool_calls(?:['\"]\])?\[0\]")
_READS_ALL_CALLS = re.compile(r"""\bin\s+\w+(?:\.|\[["'])tool_calls""")
#: How a template joins a tool's description, and a default among a parameter's choices, to a text.
_JOINS_DESCRIPTION = re.compile(r"\+\s*tool(?:\.function)?\.description\b")
_JOINS_DEFAULT = re.compile(r"\+\s*\w+\.default\b(?!\s*\|)")
_EFFORT = "reasoning_effort"
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


def readable(messages: Messages, template: str) -> Messages:
    """The messages without what the template would drop or misread.

    Those of developers are the system's or the user's unless the template knows them. Arguments of
    calls are a text where it joins them to one, as DeepSeek's templates do, and several calls are a
    message each where it reads one, as Llama's and gpt-oss's.
    """
    has_developers = any(message.get("role") == _DEVELOPER for message in messages)
    if has_developers and not _KNOWS_DEVELOPERS.search(template):
        messages = _with_one_system(messages, later=(_DEVELOPER,))
    if _READS_ONE_CALL.search(template) and not _READS_ALL_CALLS.search(template):
        messages = list(_with_single_calls(messages))
    if _JOINS_ARGUMENTS.search(template):
        messages = [_with_written_arguments(message) for message in messages]
    return list(messages)


def readable_tools(options: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The options, whose tools have texts where the template joins them to one, as gpt-oss's."""
    tools = options.get("tools") or ()
    if _JOINS_DESCRIPTION.search(template):
        tools = [_changed(tool, _with_description) for tool in tools]
    if _JOINS_DEFAULT.search(template):
        tools = [_changed(tool, _with_written_defaults) for tool in tools]
    return {**options, "tools": tools} if tools else dict(options)


def _changed(tool: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {**tool, "function": change(function)} if isinstance(function, Mapping) else tool


def _with_description(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**function, "description": function.get("description") or ""}


def _with_written_defaults(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function with the default of a parameter that lists its values as JSON, if no text."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or not isinstance(properties, Mapping):
        return function
    written = {
        name: {**one, "default": json.dumps(one["default"])} if _chooses(one) else one
        for name, one in properties.items()
    }
    return {**function, "parameters": {**parameters, "properties": written}}


def _chooses(schema: Any) -> bool:
    """Whether a schema lists values, and its default is no text."""
    lists = isinstance(schema, Mapping) and (schema.get("enum") or schema.get("oneOf"))
    return bool(lists) and not isinstance(schema.get("default", ""), str)


def eased(
    messages: Messages, options: Mapping[str, Any], template: str
) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """What a template may take after it refused or dropped this, from the least change on.

    Many templates refuse a second message of the system, or two of the user in a row. Some refuse
    an effort that they do not name; it is the nearest then. Mistral's refuse a message of the user
    right after a tool's, and Qwen3.5's a conversation without the user.
    """
    with_one = _with_one_system(messages, later=(_SYSTEM, _DEVELOPER))
    turns = _in_turns(with_one, {(_USER, _USER)})
    options = _with_known_effort(options, template)
    yield turns, options
    yield _in_turns(_with_user(turns), {(_ASSISTANT, _ASSISTANT), (_TOOL, _USER)}), options


def shows_instructions(text: str, messages: Messages) -> bool:
    """Whether a rendered conversation has all instructions: gpt-oss's template drops all but one.

    A single first one is the template's to word.
    """
    found = [message for message in messages if _instructs(message)]
    return found == list(messages[:1]) or _has_all(
        text, [(message.get("content") or "").strip() for message in found]
    )


def _has_all(text: str, parts: Sequence[str]) -> bool:
    """Whether a text has all parts; it is searched once where it has them in order."""
    place = 0
    for part in parts:
        start = text.find(part, place)
        if start >= 0:
            place = start + len(part)
        elif part not in text:
            return False
    return True


def _with_known_effort(options: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The options with the nearest effort that the template names."""
    effort = options.get(_EFFORT)
    named = [one for one in _EFFORTS if re.search(rf"""["']{one}["']""", template)]
    if effort not in _EFFORTS or not named:
        return dict(options)
    place = _EFFORTS.index(effort)
    # The greater of two that are equally near.
    nearest = min(reversed(named), key=lambda one: abs(_EFFORTS.index(one) - place))
    return {**options, _EFFORT: nearest}


def _in_turns(messages: Messages, joined: set[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """The messages with those of such neighbouring roles as one, unless the first one calls."""
    turns: list[list[Mapping[str, Any]]] = []
    for message in messages:
        turn = turns[-1] if turns else [{}]
        roles = turn[0].get("role", ""), message.get("role", "")
        if roles in joined and not turn[-1].get("tool_calls"):
            turn.append(message)
        else:
            turns.append([message])
    return [turn[0] if len(turn) == 1 else _as_one(turn) for turn in turns]


def _as_one(turn: Messages) -> Mapping[str, Any]:
    """One message with the texts of several, and other fields of the first that has them."""
    fields: dict[str, Any] = {}
    for message in reversed(turn):
        fields |= message
    return {**fields, **_joined(turn, turn[0]["role"])}


def _with_user(messages: Messages) -> Messages:
    """The messages, of which the user's are the system's if there are no others."""
    if any(message.get("role") == _USER for message in messages):
        return messages
    return [
        {**message, "role": _USER} if message.get("role") == _SYSTEM else message
        for message in messages
    ]


def _with_single_calls(messages: Messages) -> Iterator[Mapping[str, Any]]:
    """The messages with one call in each, followed by what it returned."""
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda one: one.get("role") == _TOOL, left))
        del left[: len(results)]
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            yield from (one for one in results if one.get("tool_call_id") == call.get("id"))
            results = [one for one in results if one.get("tool_call_id") != call.get("id")]
        yield from results


def _with_one_system(messages: Messages, later: Sequence[str]) -> list[Mapping[str, Any]]:
    """The messages with the first instructions as one of the system.

    Later ones of the roles ``later`` are the user's, where they stand: at the beginning they would
    change a prompt from its first token on.
    """
    first = list(takewhile(_instructs, messages))
    rest = [
        {**one, "role": _USER} if one.get("role") in later else one
        for one in messages[len(first) :]
    ]
    return [_joined(first, _SYSTEM), *rest] if first else rest


def _instructs(message: Mapping[str, Any]) -> bool:
    return message.get("role") in (_SYSTEM, _DEVELOPER)


def _joined(messages: Messages, role: str) -> Mapping[str, Any]:
    """One message of a role with the texts of several."""
    text = "\n\n".join(filter(None, (message.get("content") for message in messages)))
    return {**messages[0], "role": role, "content": text}


def _with_written_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its calls as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

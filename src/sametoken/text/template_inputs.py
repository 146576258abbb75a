"""Conversations in the form that a chat template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = Sequence[Mapping[str, Any]]
_SYSTEM, _USER = "system", "user"
#: OpenAI's role of an application's instructions, and how a template compares with it.
_DEVELOPER = "developer"
_KNOWS_DEVELOPERS = re.compile(rf"""["']{_DEVELOPER}["']""")
#: How a template joins a call's arguments to a text, which must be one too.
_JOINS_ARGUMENTS = re.compile(
    r"""\+\s*[\w.\[\]'"]+(?:\[["']|\.)arguments(?:["']\])?\s*(?:\+|-?}})"""
)
_EFFORT = "reasoning_effort"
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


def readable(messages: Messages, template: str) -> Messages:
    """The messages without what the template would drop or misread.

    Those of developers are the system's or the user's unless the template knows them, and
    arguments of calls are a text where it joins them to one, as DeepSeek's templates do.
    """
    has_developers = any(message.get("role") == _DEVELOPER for message in messages)
    if has_developers and not _KNOWS_DEVELOPERS.search(template):
        messages = _with_one_system(messages, later=(_DEVELOPER,))
    if _JOINS_ARGUMENTS.search(template):
        messages = [_with_written_arguments(message) for message in messages]
    return list(messages)


def eased(
    messages: Messages, options: Mapping[str, Any], template: str
) -> tuple[Messages, dict[str, Any]]:
    """What a template may take after it refused this, or the same if nothing can be eased.

    Many templates refuse a second message of the system, or two of the user in a row. Some refuse
    an effort that they do not name; it is the nearest then.
    """
    joined: list[Mapping[str, Any]] = []
    for message in _with_one_system(messages, later=(_SYSTEM, _DEVELOPER)):
        if joined and joined[-1].get("role") == message.get("role") == _USER:
            joined[-1] = _joined((joined[-1], message), _USER)
        else:
            joined.append(message)
    effort = options.get(_EFFORT)
    named = [one for one in _EFFORTS if re.search(rf"""["']{one}["']""", template)]
    if effort not in _EFFORTS or not named:
        return joined, dict(options)
    place = _EFFORTS.index(effort)
    # The greater of two that are equally near.
    nearest = min(reversed(named), key=lambda one: abs(_EFFORTS.index(one) - place))
    return joined, {**options, _EFFORT: nearest}


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
    text = "\n\n".join(message.get("content") or "" for message in messages)
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

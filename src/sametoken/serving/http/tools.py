"""Tools of a chat request: for the chat template, and for parsing calls in the answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sametoken.engine.user_inputs import content_text
from sametoken.errors import shown
from sametoken.serving.http.body import require_bounded
from sametoken.serving.http.connections import LogRateLimit
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.json_calls import parse_required
from sametoken.serving.http.parsed import Parser, call_or_text, parse_nothing
from sametoken.serving.http.schemas import ChatRequest, Message
from sametoken.serving.http.tool_media import without_media
from sametoken.serving.http.tool_parsers import CallSyntax, named_parser
from sametoken.serving.http.tool_schemas import AllowedTools, EarlierCall, Tool
from sametoken.text.grammar.json_schema import moved
from sametoken.types.structured_outputs import StructuredOutputs

#: Where templates read an earlier message's reasoning: gpt-oss's the last, Qwen's the second.
_REASONING = ("reasoning", "reasoning_content", "thinking")
#: Ids of calls as models write and expect them, by the values of ``--tool-call-parser``. The number
#: is that of the calls before it in the conversation.
_CALL_IDS = {"kimi_k2": "functions.{name}:{number}", "mistral": "{number:09}"}
#: Parameters of a function that declares none.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# What is said of earlier calls is said again with every later request, which has more of them.
logging.getLogger("sametoken.engine.user_inputs").addFilter(LogRateLimit())


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        tools: tools for the chat template, if any.
        parser: finds calls in the answer, and reasoning once the prompt is known.
        structured: the answer's constraint.
        reports_calls: whether an answer with calls has finish reason "tool_calls".
        custom: names of the tools that take a text.
    """

    tools: list[dict[str, Any]] | None
    parser: Parser
    structured: StructuredOutputs | None
    reports_calls: bool = True
    custom: frozenset[str] = frozenset()

    @property
    def functions(self) -> list[str]:
        """Names of the functions in the chat template."""
        return [tool["function"]["name"] for tool in self.tools or ()]


def with_allowed(request: ChatRequest) -> ChatRequest:
    """The request with those of its tools that may be called, if its choice says which.

    The model does not see the others.

    Raises:
        ApiError: a tool that may be called is not among them.
    """
    choice = request.tool_choice
    if not isinstance(choice, AllowedTools):
        return request
    known = {tool.function.name: tool for tool in request.tools or ()}
    for one in choice.allowed_tools.tools:
        _named(known, one.function.name)
    names = {one.function.name for one in choice.allowed_tools.tools}
    tools = [tool for name, tool in known.items() if name in names]
    return request.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})


def tool_use(
    request: ChatRequest, structured: StructuredOutputs | None, syntax: CallSyntax | None
) -> ToolUse:
    """Resolve a request's ``tools`` and ``tool_choice``.

    Args:
        request: the request, ``with_allowed``.
        structured: the request's own constraint.
        syntax: of the model's calls, if it is known and the model decides about them.

    Raises:
        ApiError: the choice is impossible or contradicts something else.
    """
    choice = request.tool_choice
    assert not isinstance(choice, AllowedTools)
    if not request.tools:
        # Agents without a tool send an empty list with what they always choose.
        asks_for_nothing = choice == "auto" and request.tools is not None
        if choice not in (None, "none") and not asks_for_nothing:
            raise invalid("tool_choice needs tools. Send tools, or leave it out", "tool_choice")
        return ToolUse(None, parse_nothing, structured)
    tools = template_tools(request.tools)
    if choice == "none":
        return ToolUse(tools, parse_nothing, structured)
    if request.may_call:
        return _call_or_form(tools, structured, syntax)
    # A response_format is that of texts, and a forced call is none.
    if structured is not None and not request.formats_text:
        raise invalid(
            "structured outputs and a forced call contradict each other. Send one of them, or "
            "response_format, which a call leaves aside",
            "tool_choice",
        )
    if choice is not None and not isinstance(choice, str):
        known = {tool.function.name: tool for tool in request.tools}
        chosen = _named(known, choice.function.name)
        form = StructuredOutputs(json_schema=chosen.function.parameters or _NO_PARAMETERS)
        return ToolUse(tools, named_parser(chosen.function.name), form, reports_calls=False)
    return ToolUse(tools, parse_required, StructuredOutputs(json_schema=_any_call(request)))


def _call_or_form(
    tools: list[dict[str, Any]], structured: StructuredOutputs | None, syntax: CallSyntax | None
) -> ToolUse:
    """The use of tools that the model may call instead of an answer under the constraint."""
    if syntax is None:
        raise invalid(
            "the syntax of this model's tool calls is not known. Start the server with "
            '--tool-call-parser, or use tool_choice "required"',
            "tools",
        )
    if structured is None:
        return ToolUse(tools, syntax.parser, None)
    if syntax.mark is None:
        raise invalid(
            "structured outputs and tools that the model may call go together only if a grammar "
            "can tell its calls from other answers, which is not so on this server. Send one of "
            'them, or tool_choice "none"; response_format also goes with "required" or a named '
            "function",
            "tool_choice",
        )
    structured = replace(structured, free_after=syntax.mark if syntax.is_constrained else None)
    return ToolUse(tools, call_or_text(syntax.parser, syntax.mark), structured)


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the format of chat templates."""
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_unset=True)}
        for tool in tools
    ]


def template_messages(
    messages: Sequence[Message], parser: str | None = None
) -> list[dict[str, Any]]:
    """Messages as ``LLM.chat`` takes them, with the reasoning where any template reads it.

    Args:
        messages: the client's messages.
        parser: the name of the parser of tool calls, whose model may expect ids of a form.

    Raises:
        RequestError: a part is not text.
        ApiError: arguments of a call are beyond a limit of bodies.
    """
    found = [_template_message(message) for message in messages]
    if parser in _CALL_IDS:
        _rename_calls(found, _CALL_IDS[parser])
    return found


def _rename_calls(messages: Sequence[dict[str, Any]], form: str) -> None:
    """Give calls, and the messages of what they returned, ids of a form.

    Kimi writes wrong calls after other ids, and templates of Mistral refuse them.
    """
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            given = call["id"]
            call["id"] = ids[given] = form.format(name=call["function"]["name"], number=number)
            number += 1
        returned = message.get("tool_call_id")
        if returned in ids:
            message["tool_call_id"] = ids[returned]


def _template_message(message: Message) -> dict[str, Any]:
    values = message.model_dump(exclude_unset=True)
    if message.tool_calls:
        values["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.role == "tool" and isinstance(message.content, list):
        values["content"] = without_media(message.content)
    _spread_reasoning(message, values)
    return values


def _template_call(call: EarlierCall) -> dict[str, Any]:
    """The call. Its arguments are JSON in a string, which the limits of bodies leave out."""
    function = call.function
    try:
        require_bounded(function.arguments.encode())
    except ValueError as error:
        raise invalid(
            f"a tool call of an earlier message has arguments that cannot be read: {error}. Send "
            "less",
            "messages",
        ) from error
    return {"id": call.id, "type": "function", "function": function.model_dump()}


def _spread_reasoning(message: Message, values: dict[str, Any]) -> None:
    """Put an assistant's earlier reasoning under every name that a template reads, or none."""
    is_answer = message.role == "assistant"
    reasoning = (message.reasoning or message.reasoning_content) if is_answer else None
    for name in _REASONING:
        if reasoning:
            values[name] = reasoning
        elif values.get(name) is None:
            values.pop(name, None)
    if reasoning and message.tool_calls and content_text(message.content):
        # gpt-oss's template refuses a call with both, and transformers fills what is missing.
        values["thinking"] = ""


def _named(tools: Mapping[str, Tool], name: str) -> Tool:
    if name in tools:
        return tools[name]
    raise invalid(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")


def _any_call(request: ChatRequest) -> dict[str, Any]:
    """A schema for calls of any of the tools: one, or more if they may be parallel.

    The parameters of each have a place of their own, to which their references lead.
    """
    calls, parameters = [], {}
    for position, tool in enumerate(request.tools or ()):
        place = f"#/$defs/{position}"
        parameters[str(position)] = moved(tool.function.parameters or _NO_PARAMETERS, place)
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        calls.append(call)
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": parameters}
    return schema if request.parallel_tool_calls is not False else {**schema, "maxItems": 1}

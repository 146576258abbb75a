"""Items of a request for a response to the messages of a conversation."""

from __future__ import annotations

from typing import Any

from sametoken.engine.user_inputs import TEXT_PARTS
from sametoken.errors import shown
from sametoken.serving.http.custom_inputs import input_arguments
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.responses_api.request import AllowedTools as ResponseAllowedTools
from sametoken.serving.http.responses_api.request import (
    InputItem,
    Parts,
    ResponsesRequest,
    TextFormat,
)
from sametoken.serving.http.responses_api.tools import CalledName, chat_tools
from sametoken.serving.http.schemas import (
    ChatRequest,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    require_few_calls,
)
from sametoken.serving.http.tool_media import without_media
from sametoken.serving.http.tool_schemas import (
    AllowedNames,
    AllowedTools,
    NamedCustomTool,
    NamedTool,
    ToolName,
)

#: Roles whose messages instruct the model.
_INSTRUCTING = ("system", "developer")
#: Types of parts that are text, by the name of the field that holds it.
_TEXTS = {**TEXT_PARTS, "reasoning_text": "text", "summary_text": "text"}


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The same request for a chat completion.

    Raises:
        ApiError: an item lacks a field, or holds other parts than text; or see ``chat_tools`` and
            ``require_few_calls``.
    """
    return ChatRequest.of(
        request,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=None if request.tools is None else chat_tools(request.tools),
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format if request.text else None),
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _choice(request: ResponsesRequest) -> str | NamedTool | AllowedTools | None:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if not isinstance(choice, ResponseAllowedTools):
        return NamedTool(function=ToolName(name=choice.name))
    # Tools of other types are none of the model's.
    known: list[NamedTool | NamedCustomTool] = [
        NamedTool(function=ToolName(name=CalledName(one.name, one.namespace).shown_to_model))
        for one in choice.tools
        if one.type in ("function", "custom") and one.name is not None
    ]
    if not known:
        fault = 'tool_choice allows no function and no custom tool. Name one, or use "none"'
        raise invalid(fault, "tool_choice")
    allowed = AllowedNames(mode=choice.mode, tools=known)
    return AllowedTools(type="allowed_tools", allowed_tools=allowed)


def _response_format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.schema_ is None:
        raise invalid("text.format of type json_schema lacks 'schema'. Add it", "text")
    schema = JsonSchemaFormat.model_validate({"schema": asked.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _messages(request: ResponsesRequest) -> list[Message]:
    writer = _MessageWriter()
    if request.instructions:
        writer.add("system", content=request.instructions)
    if isinstance(request.input, str):
        writer.add("user", content=request.input)
    else:
        for index, item in enumerate(request.input):
            writer.read(item, f"input.{index}")
    return writer.messages()


class _MessageWriter:
    """Joins the reasoning, text and calls of one turn of the assistant in one message."""

    def __init__(self) -> None:
        self._written: list[dict[str, Any]] = []
        #: What follows the text of the first message; joined at the end, as they may be many.
        self._instructions: list[str] = []

    def add(self, role: str, **fields: Any) -> None:
        """Begin a message."""
        self._written.append({"role": role, **fields})

    def messages(self) -> list[Message]:
        """All messages.

        Raises:
            ApiError: see ``require_few_calls``.
        """
        if self._instructions:
            first = self._written[0]
            first["content"] = "\n\n".join((first["content"], *self._instructions))
        for fields in self._written:
            require_few_calls(fields.get("tool_calls", ()), "input")
        return [Message(**{"content": None} | fields) for fields in self._written]

    def read(self, item: InputItem, place: str) -> None:
        """Read an item.

        Raises:
            ApiError: see ``chat_request``.
        """
        if item.type == "message":
            role = _needed(item.role, "role", place)
            self._message(role, _needed_text(item.content, "content", place))
        elif item.type == "reasoning":
            text = _text(item.content, place) or _text(item.summary, place)
            if text:
                self._of_assistant("reasoning", "content", "tool_calls")["reasoning"] = text
        elif item.type in ("function_call", "custom_tool_call"):
            name = CalledName(_needed(item.name, "name", place), item.namespace)
            call = {
                "id": _needed(item.call_id, "call_id", place),
                "type": "function",
                "function": {"name": name.shown_to_model, "arguments": _arguments(item, place)},
            }
            self._of_assistant().setdefault("tool_calls", []).append(call)
        elif item.type == "item_reference":
            fault = f"{place} refers to a stored item, and nothing is stored. Send the item itself"
            raise invalid(f"{fault}, as clients do with store: false", "input", "unsupported")
        else:
            call_id = _needed(item.call_id, "call_id", place)
            given = item.output
            given = without_media(given) if isinstance(given, list) else given
            output = _needed_text(given, "output", place)
            self.add("tool", content=output, tool_call_id=call_id)

    def _message(self, role: str, text: str) -> None:
        if role == "assistant":
            self._of_assistant("content", "tool_calls")["content"] = text
        elif role in _INSTRUCTING and self._only_instructs:
            # Many templates read one such message alone.
            self._instructions.append(text)
        else:
            self.add(role, content=text)

    @property
    def _only_instructs(self) -> bool:
        return len(self._written) == 1 and self._written[0]["role"] in _INSTRUCTING

    def _of_assistant(self, *missing: str) -> dict[str, Any]:
        """The last message, if it is the assistant's and none of these is in it; or a new one."""
        last = self._written[-1] if self._written else {"role": ""}
        if last["role"] != "assistant" or any(name in last for name in missing):
            self.add("assistant")
        return self._written[-1]


def _arguments(item: InputItem, place: str) -> str:
    """The arguments of a call as the model has written them."""
    if item.type == "custom_tool_call":
        return input_arguments(_needed(item.input, "input", place))
    return item.arguments or ""


def _needed(value: str | None, name: str, place: str) -> str:
    if value is None:
        raise invalid(f"{place} lacks {name!r}. Add it", "input")
    return value


def _needed_text(content: str | Parts | None, name: str, place: str) -> str:
    return _text(content, place) if isinstance(content, list) else _needed(content, name, place)


def _text(content: str | Parts | None, place: str) -> str:
    """The text of a text or of its parts."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(_part_text(part, place) for part in content)


def _part_text(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        fault = f"{place} has a part of type {shown(kind)}. Only text is supported"
        raise invalid(fault, "input", "unsupported")
    text = part.get(field)
    if not isinstance(text, str):
        raise invalid(f"{place} has a part of type {kind} without {field!r}. Add it", "input")
    return text

"""A request for a message to that for a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, groupby, takewhile
from typing import Any

from sametoken.engine.user_inputs import TEXT_PARTS
from sametoken.errors import shown
from sametoken.serving.http.errors import ApiError, invalid
from sametoken.serving.http.messages_api.request import (
    Block,
    CountTokensRequest,
    CustomTool,
    InputMessage,
    MessageTool,
    OutputConfig,
    OutputFormat,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from sametoken.serving.http.other_tools import tell_of_others
from sametoken.serving.http.schemas import (
    ChatRequest,
    Message,
    ResponseFormat,
    require_few_calls,
    thinking_variables,
)
from sametoken.serving.http.tool_media import without_media
from sametoken.serving.http.tool_schemas import (
    FunctionDefinition,
    FunctionTool,
    NamedTool,
    Tool,
    ToolName,
)

#: Begins a block that Claude Code puts before its instructions. It differs between requests, so
#: that no prefix would be found again.
_ATTRIBUTION = "x-anthropic-billing-header"
#: The type of a part that names a tool, which the request has among its own by then.
_FOUND_TOOL = "tool_reference"
#: The types of blocks that messages of a role may have. Redacted ones are left out.
_BLOCKS: Mapping[str, frozenset[str]] = {
    "assistant": frozenset({"redacted_thinking", "text", "thinking", "tool_use"}),
    "system": frozenset({"text"}),
    "user": frozenset({"text", "tool_result"}),
}
#: The values of ``tool_choice`` in chats.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: CountTokensRequest, max_tokens: int | None = None) -> ChatRequest:
    """The same request for a chat completion.

    Raises:
        ApiError: a message has a block that is not supported, or the choice of a tool no name, or
            see ``_response_format``, ``_tools`` and ``require_few_calls``.
    """
    _require_supported(request)
    config, choice = request.output_config or OutputConfig(), request.tool_choice
    continues = request.messages[-1].role == "assistant"
    thinks = request.thinking and thinking_variables(request.thinking.type != "disabled")
    return ChatRequest.of(
        request,
        messages=_messages(request),
        max_completion_tokens=max_tokens,
        stop=request.stop_sequences,
        tools=None if request.tools is None else _tools(request.tools),
        tool_choice=choice and _choice(choice),
        parallel_tool_calls=choice and not choice.disable_parallel_tool_use,
        response_format=_response_format(config.format, request.output_format),
        reasoning_effort=config.effort,
        chat_template_kwargs={**(thinks or {}), **(request.chat_template_kwargs or {})},
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _response_format(
    given: OutputFormat | None, earlier: OutputFormat | None
) -> ResponseFormat | None:
    """The constraint of the text.

    Args:
        given: in ``output_config``.
        earlier: in ``output_format``, its place in Anthropic's beta, where clients still send it.

    Raises:
        ApiError: both are given.
    """
    if given is not None and earlier is not None:
        raise invalid(
            "output_config.format and output_format are one field. Send one of them",
            "output_format",
        )
    if (chosen := given or earlier) is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=chosen)


def _require_supported(request: CountTokensRequest) -> None:
    for index, block in enumerate(_blocks(request.system)):
        _require_block(block, "system", f"system.{index}")
    for number, message in enumerate(request.messages):
        for index, block in enumerate(_blocks(message.content)):
            _require_block(block, message.role, f"messages.{number}.content.{index}")


def _require_block(block: Block, role: str, place: str) -> None:
    """Refuse a block that a message of its role may not have, or a result that is not text.

    Args:
        block: of the message.
        role: of the message.
        place: in the request. Claude Code drops the image or document that an error names in
            Anthropic's form, ``messages.0.content.0.image``, and goes on.
    """
    if block.type not in _BLOCKS[role]:
        raise _unsupported(f"{place}.{_bare(block.type)}", role)
    result = _result(block) if isinstance(block, ToolResultBlock) else ""
    if isinstance(result, list):
        for index, part in enumerate(result):
            if (kind := part.get("type")) not in list(TEXT_PARTS):
                raise _unsupported(f"{place}.tool_result.content.{index}.{_bare(kind)}", role)


def _bare(kind: Any) -> str:
    return kind if isinstance(kind, str) and kind.isidentifier() else shown(kind)


def _unsupported(place: str, role: str) -> ApiError:
    return invalid(
        f"{place} is not supported in a message of the {role}. Send text, thinking and tool_use of "
        "the assistant, or tool_result of the user, which holds text",
        "messages",
        "unsupported",
    )


def _tools(tools: Sequence[MessageTool]) -> list[Tool]:
    """The functions for a chat template. A line in the log tells of tools that are left out.

    Raises:
        ApiError: there are others alone. Claude Code searches the web by such a request, and would
            take for its results what the model makes up.
    """
    if tools and not any(isinstance(tool, CustomTool) for tool in tools):
        kinds = ", ".join(sorted({str(tool.type) for tool in tools}))
        raise invalid(
            f"the server runs no tools of its own ({shown(kinds)}). Send some with an input_schema",
            "tools",
            "unsupported",
        )
    tell_of_others(tools)
    found: list[Tool] = []
    for tool in tools:
        if isinstance(tool, CustomTool):
            fields = tool.model_dump(exclude_unset=True, exclude={"type", "input_schema"})
            function = FunctionDefinition(parameters=tool.input_schema, **fields)
            found.append(FunctionTool(type="function", function=function))
    return found


def _choice(choice: ToolChoice) -> str | NamedTool:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice of type tool lacks 'name'. Add it", "tool_choice")
    return NamedTool(function=ToolName(name=choice.name))


def _messages(request: CountTokensRequest) -> list[Message]:
    """The messages: one of the system, then the turns of the user and of the assistant.

    Messages of the system after the first turn are the user's, where they stand: many templates
    refuse those of the system there, and at the beginning they would change the prefix.
    """
    first = takewhile(_is_system, request.messages)
    instructions = _texts([*_blocks(request.system), *_blocks_of(first)])
    text = "\n".join(one for one in instructions if not one.startswith(_ATTRIBUTION))
    found = [Message(role="system", content=text)] if text else []
    turns = dropwhile(_is_system, request.messages)
    for is_answer, turn in groupby(turns, lambda message: message.role == "assistant"):
        blocks = _blocks_of(turn)
        found += [_answer(blocks)] if is_answer else _question(blocks)
    return found


def _is_system(message: InputMessage) -> bool:
    return message.role == "system"


def _blocks_of(messages: Iterable[InputMessage]) -> list[Block]:
    return [block for message in messages for block in _blocks(message.content)]


def _blocks(content: str | list[Block] | None) -> list[Block]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return content or []


def _result(block: ToolResultBlock) -> str | list[dict[str, Any]]:
    """What a tool returned. The model is told of media, and of tools that a search has loaded."""
    if not isinstance(block.content, list):
        return block.content or ""
    return [
        {"type": "text", "text": f"{part['tool_name']} can be called now"}
        if part.get("type") == _FOUND_TOOL and isinstance(part.get("tool_name"), str)
        else part
        for part in without_media(block.content)
    ]


def _question(blocks: Sequence[Block]) -> list[Message]:
    """A turn of the user: the results of calls, which must follow these, then the text."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    found = [
        Message(role="tool", content=_result(one), tool_call_id=one.tool_use_id) for one in results
    ]
    texts = list(_texts(blocks))
    if texts or not results:
        found.append(Message(role="user", content="\n".join(texts)))
    return found


def _answer(blocks: Sequence[Block]) -> Message:
    """A turn of the assistant, whose blocks are pieces of what the model wrote.

    Raises:
        ApiError: see ``require_few_calls``.
    """
    reasoning, texts, calls = [], [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
    fields: dict[str, Any] = {"content": "".join(texts)}
    if reasoning:
        fields["reasoning"] = "".join(reasoning)
    if calls:
        require_few_calls(calls, "messages")
        fields["tool_calls"] = calls
    return Message(role="assistant", **fields)


def _texts(blocks: Iterable[Block]) -> Iterator[str]:
    """The texts that are not empty."""
    return (block.text for block in blocks if isinstance(block, TextBlock) and block.text)

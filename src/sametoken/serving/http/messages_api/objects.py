"""Models of messages and of their streams' events."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from sametoken.serving.http.response_schemas import Sent

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class Text(Sent):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class Thinking(Sent):
    """Reasoning of the model. Its signature is read by nobody, but some clients need one."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUse(Sent):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Text | Thinking | ToolUse


class MessageUsage(Sent):
    """Tokens of a message; those of the prompt from the prefix cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Sent):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """One event of a stream; its type says which fields it has."""

    type: str
    message: MessageObject | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


class MessagesErrorDetail(BaseModel):
    """Type, and cause and remedy, of an error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """An error response."""

    type: Literal["error"]
    error: MessagesErrorDetail

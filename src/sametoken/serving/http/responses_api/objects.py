"""Models of responses and of their streams' events."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from sametoken.serving.http.response_schemas import Sent, SpeculationStats, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(Sent):
    """Reasoning of the model."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputText(Sent):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob] | None = None


class ReasoningItem(Sent):
    """What the model thought before an answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    status: Status


class MessageItem(Sent):
    """A message of the model."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    status: Status


class CallItem(Sent):
    """A call of a function, with its arguments as the model's JSON text."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status


class CustomCallItem(Sent):
    """A call of a custom tool, with the text that it takes."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


OutputItem = ReasoningItem | MessageItem | CallItem | CustomCallItem


class InputTokensDetails(Sent):
    """Tokens from the prefix cache; what is written there is not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(BaseModel):
    """Tokens of reasoning, counted by encoding its text."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class InputTokens(Sent):
    """The number of tokens of a response's input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseFault(Sent):
    """Why a response failed; the event ``error`` before it has the error's own code."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseObject(Sent):
    """A response, with the options that it was made with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status | Literal["failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    speculation: SpeculationStats | None = None


class ResponseEvent(BaseModel):
    """One event of a stream; its type says which fields it has."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: ReasoningText | OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
    arguments: str | None = None
    input: str | None = None
    name: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None

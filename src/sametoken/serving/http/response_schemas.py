"""Models of responses. Fields that were not set are not sent."""

from __future__ import annotations

import base64
import io
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from starlette.responses import Response

from sametoken.types.outputs import CompletionOutput, RequestOutput

FinishReason = Literal["stop", "length", "tool_calls"]


class Sent(BaseModel):
    """An object whose fields are sent if they have a value, or were set to null."""

    def model_post_init(self, context: Any) -> None:
        """Mark defaults as set."""
        self.__pydantic_fields_set__.update(name for name, value in self if value is not None)


class PromptTokensDetails(BaseModel):
    """Prompt tokens from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculationStats(BaseModel):
    """Speculation counters of one request; the bonus token is not counted as accepted.

    The optional lists have one entry per step, beginning with the step that ends the prompt.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float
    acceptance_rate: float
    acceptance_per_position: list[float]
    offered_per_position: list[int]
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities in the format of completions: lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """One candidate; the bytes of a character's tokens together are the character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """One token of the answer and the likeliest candidates at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities in the format of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


#: Candidates per prompt position by token id, in vLLM's format; the first position has none.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionChoice(BaseModel):
    """One completion, or its new part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: str | None = None


class CompletionResponse(BaseModel):
    """All completions of a request, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class CalledFunction(BaseModel):
    """A function's name, and its arguments as the model's JSON text."""

    name: str | None = None
    arguments: str


class CalledCustomTool(BaseModel):
    """A custom tool's name, and the text that it is called with."""

    name: str | None = None
    input: str


class ToolCall(BaseModel):
    """A tool call of the model, or its new part in a stream."""

    index: int | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ChatMessage(BaseModel):
    """The assistant's message, or its new part in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[int] | None = None
    routed_experts: str | None = None


class ChatResponse(BaseModel):
    """All answers of a request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    speculation: SpeculationStats | None = None


class ChatChunkChoice(BaseModel):
    """The new part of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[int] | None = None
    routed_experts: str | None = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    speculation: SpeculationStats | None = None


class ModelCard(BaseModel):
    """The model under one of its names, or an adapter, whose ``parent`` is the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sametoken"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """The names that requests may use."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Text of token ids."""

    prompt: str


class Version(BaseModel):
    """The version of the server."""

    version: str


class Health(BaseModel):
    """Whether the engine runs and accepts requests, and the shadow audit's results."""

    status: Literal["ok", "draining", "down"]
    detail: dict[str, Any]


class ErrorDetail(BaseModel):
    """Cause and remedy, type, field and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error response."""

    error: ErrorDetail


def note_versions(
    choice: CompletionChoice | ChatChoice | ChatChunkChoice, output: RequestOutput
) -> None:
    """Show in a choice which weights computed its oldest KV and its newest token."""
    if output.weight_versions is not None:
        choice.weight_versions = list(output.weight_versions)


def note_experts(
    choice: CompletionChoice | ChatChoice | ChatChunkChoice, completion: CompletionOutput
) -> None:
    """Show in a choice the experts of a finished completion: a .npy file in base64."""
    if completion.routed_experts is not None:
        file = io.BytesIO()
        np.save(file, completion.routed_experts, allow_pickle=False)
        choice.routed_experts = base64.b64encode(file.getvalue()).decode()


def json_response(answer: BaseModel) -> Response:
    """A response as JSON. It may be long: call this off the event loop."""
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

"""Answers as clients receive them. Fields that were not set are not sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, how many came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculationStats(BaseModel):
    """Speculation counters of one request; the bonus token is not among the accepted.

    The lists, on request, have one entry per step, and begin with the step that ends the prompt.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float
    acceptance_rate: float
    acceptance_per_position: list[float]
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities in the form of completions: lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """One candidate; ``bytes`` is null for a token that is no text by itself."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """One token of the answer and the likeliest candidates at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities in the form of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


#: Candidates per prompt position by token id, as vLLM sends them; the first has none.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionChoice(BaseModel):
    """One completion, or in a stream what was added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
    """A function's name, and its arguments as JSON text written by the model."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call that the model wants made; in a stream, what was added to it."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's message; in a stream, what was added to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


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
    """What was added to one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    speculation: SpeculationStats | None = None


class ModelCard(BaseModel):
    """A model by one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sametoken"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Every name that requests may use."""

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
    """Whether the engine runs and takes requests, and what the shadow audit found."""

    status: Literal["ok", "draining", "down"]
    detail: dict[str, Any]


class ErrorDetail(BaseModel):
    """What is wrong: cause and remedy, kind, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer other than success."""

    error: ErrorDetail


def json_response(answer: BaseModel) -> JSONResponse:
    """An answer in one piece. It may be long: call this off the event loop."""
    return JSONResponse(answer.model_dump(exclude_unset=True))

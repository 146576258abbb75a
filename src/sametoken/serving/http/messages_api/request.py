"""Models of a request for a message, in Anthropic's format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from sametoken.errors import shown
from sametoken.serving.http.connections import LogRateLimit
from sametoken.serving.http.other_tools import OtherTool
from sametoken.serving.http.schemas import (
    ELSEWHERE,
    IGNORED_FIELDS,
    MAX_MESSAGES,
    MAX_PARTS,
    NEUTRAL_VALUES,
    REFUSED_FIELDS,
    Count,
    Effort,
    JsonSchemaFormat,
    Limit,
    One,
    SamplingFields,
    StopText,
)
from sametoken.serving.http.unions import Given, by_type
from sametoken.types.option_values import closest
from sametoken.types.sampling_params import MAX_STOPS

_logger = logging.getLogger(__name__)
_logger.addFilter(LogRateLimit())


class TextBlock(Given):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Given):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Given):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Given):
    """What a call returned; ``is_error`` is ignored, as no template has a place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)] | None
    ) = None


class OtherBlock(Given):
    """A block of another type."""

    type: str


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[OtherBlock, Tag("OtherBlock")],
    by_type(
        "OtherBlock",
        text="TextBlock",
        thinking="ThinkingBlock",
        tool_use="ToolUseBlock",
        tool_result="ToolResultBlock",
    ),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputMessage(Given):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CustomTool(Given):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


MessageTool = Annotated[
    Annotated[CustomTool, Tag("FunctionTool")] | Annotated[OtherTool, Tag("OtherTool")],
    by_type("OtherTool", custom="FunctionTool"),
]


class ToolChoice(Given):
    """Whether the answer calls tools; ``name`` is of type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Given):
    """Whether the model reasons, and the most tokens of it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class OutputFormat(JsonSchemaFormat):
    """The constraint of the answer's text."""

    type: Literal["json_schema"]


class OutputConfig(Given):
    """Options of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields):
    """Count the tokens of a conversation."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_FIELDS,
        "input": "use messages",
        "max_completion_tokens": "use max_tokens",
        "max_output_tokens": "use max_tokens",
        "mcp_servers": "let the client call them, and send their tools",
        "reasoning_effort": "use output_config.effort",
        "thread": "nothing is stored; send the earlier messages",
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_FIELDS | {
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "max_tokens",
        "speed",
        "user_profile_id",
    }
    neutral: ClassVar[Mapping[str, Any]] = {**NEUTRAL_VALUES, "mcp_servers": []}
    elsewhere: ClassVar[Mapping[str, str]] = {
        **ELSEWHERE,
        "guided_json": "use output_config.format",
        "include_speculation_stats": "use /v1/chat/completions",
        "response_format": "use output_config.format",
        "stop": "use stop_sequences",
        "stream_options": "leave it out; a stream has the usage",
    }

    n: One = 1
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: str | Blocks | None = None
    stop_sequences: (
        Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ) = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def meet_unknown(self, name: str) -> None:
        """Ignore an unknown field, as agents send those of betas unasked, unless it is misspelled.

        Raises:
            ApiError: it is spelled nearly as a known field.
        """
        if closest(name, type(self).model_fields) is not None:
            super().meet_unknown(name)
        _logger.warning("a request has the unknown field %s, which is ignored", shown(name))


class MessagesRequest(CountTokensRequest):
    """Answer a conversation."""

    max_tokens: Limit

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, None if that leaves no token for a text."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return budget if budget is not None and budget + 1 < self.max_tokens else None

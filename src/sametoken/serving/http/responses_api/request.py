"""Models of a request for a response, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from sametoken.errors import shown
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.responses_api.tools import ResponseTool
from sametoken.serving.http.schemas import (
    ELSEWHERE,
    IGNORED_FIELDS,
    MAX_MESSAGES,
    MAX_PARTS,
    NEUTRAL_VALUES,
    REFUSED_FIELDS,
    Candidates,
    Effort,
    Limit,
    One,
    RequestId,
    SamplingFields,
)
from sametoken.serving.http.unions import Given, Strict, by_type

LOGPROBS = "message.output_text.logprobs"
#: What ``include`` may name. The others add nothing: reasoning is never encrypted, the server runs
#: no tools, and reads no images.
INCLUDED = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_STATELESS = "nothing is stored; send the earlier items as input"

Parts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(Given):
    """One item of a conversation; which fields it needs depends on its type."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
    ] = "message"
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None


class NamedTool(Strict):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str


class AllowedTool(Given):
    """A tool that may be called. Those of other types than functions and custom ones never are."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True)]


class TextFormat(Given):
    """The constraint of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """Options of reasoning; summaries are not made."""

    context: Literal["auto"] | None = None
    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Choice = Annotated[
    Annotated[NamedTool, Tag("NamedTool")] | Annotated[AllowedTools, Tag("AllowedTools")],
    by_type("NamedTool", function="NamedTool", custom="NamedTool", allowed_tools="AllowedTools"),
]


class ResponsesRequest(SamplingFields):
    """Answer a conversation of items."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_FIELDS,
        "background": "leave it out; the answer comes with the request",
        "context_management": "shorten the input",
        "conversation": _STATELESS,
        "max_new_tokens": "use max_output_tokens",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "enable_response_messages": "use /v1/chat/completions with return_token_ids",
        "previous_input_messages": _STATELESS,
        "previous_response": _STATELESS,
        "previous_response_id": _STATELESS,
        "prompt": "prompts are not stored; send their text as instructions",
        "reasoning_effort": "use reasoning.effort",
        "truncation": "shorten the input",
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_FIELDS - {"metadata"} | {"max_tool_calls"}
    neutral: ClassVar[Mapping[str, Any]] = {
        **NEUTRAL_VALUES,
        "background": False,
        "enable_response_messages": False,
        "truncation": "disabled",
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        **ELSEWHERE,
        "guided_json": "use text.format",
        "response_format": "use text.format",
    }

    n: One = 1
    input: (
        str
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    top_logprobs: Candidates | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_PARTS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: RequestId | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts come with the log-probabilities of their tokens."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check_fields(self, num_prompts: int) -> None:
        """See ``SamplingFields.check_fields``."""
        verbosity = self.text.verbosity if self.text else None
        if verbosity not in (None, self.neutral["verbosity"]):
            remedy = self.refused["verbosity"]
            raise invalid(f"text.verbosity is not supported: {remedy}", "text", "unsupported")
        for name in self.include or ():
            if name not in INCLUDED:
                remedy = f"Use {LOGPROBS}, or leave it out"
                raise invalid(f"include names {shown(name)}. {remedy}", "include", "unsupported")
        super().check_fields(num_prompts)

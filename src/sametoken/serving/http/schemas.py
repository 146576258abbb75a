"""Models of requests: OpenAI's fields, vLLM's, and two of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sametoken.errors import shown
from sametoken.serving.http.errors import ApiError, invalid
from sametoken.serving.http.tool_schemas import AllowedTools, EarlierCall, NamedChoice, Tools
from sametoken.serving.http.unions import Given, Strict
from sametoken.types.option_values import closest
from sametoken.types.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_IDS,
)

#: Limits of a request's lists, and of its unknown fields.
MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS = 8192, 8192, 1024
MAX_CHOICES, MAX_EXTRA = 4096, 64

#: Fields of other servers that change no token; accepted and ignored.
IGNORED_FIELDS = frozenset(
    {
        "client_metadata",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "user",
    }
)
#: Value of ``include_speculation_stats`` that adds the drafts of every step.
DETAILED: Literal["detailed"] = "detailed"
TEMPLATE_WRITES = "the chat template writes them"
#: Known fields that are refused, with what to do instead.
REFUSED_FIELDS: Mapping[str, str] = {
    "add_special_tokens": TEMPLATE_WRITES,
    "audio": "only text is supported; leave it out",
    "best_of": "leave it out; n is the number of answers",
    "cache_salt": "turn the prefix cache off where times may reveal prompts",
    "chat_template": "start the server with --chat-template FILE",
    "documents": "put the texts into the messages",
    "ec_transfer_params": "leave it out; one engine computes the whole answer",
    "echo": "it belongs to /v1/completions",
    "enable_thinking": "send it in chat_template_kwargs",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_decoding_backend": "leave it out; xgrammar compiles every grammar",
    "guided_whitespace_pattern": "use a regex or a grammar, which say where whitespace stands",
    "kv_transfer_params": "leave it out; one engine computes the whole answer",
    "length_penalty": "it belongs to beam search, which is not supported",
    "logprob_token_ids": "use logprobs, and top_logprobs in a chat",
    "lora_path": "name the adapter in model",
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "max_new_tokens": "use max_tokens",
    "modalities": "only text is supported; leave it out",
    "moderation": "leave it out; the server moderates nothing",
    "num_speculative_tokens": "send it in speculative",
    "priority": "leave it out; requests run in the order they come",
    "prompt_embeds": "send the prompt as text or token ids",
    "reasoning_effort": "it belongs to conversations; use /v1/chat/completions",
    "repetition_detection": "use repetition_penalty, frequency_penalty or max_tokens",
    "request_id": "leave it out; the server makes one",
    "return_mm_kwargs": "only text is supported; leave it out",
    "return_prompt_text": "use return_token_ids, and /detokenize",
    "return_token_offsets": "use /tokenize with return_token_strs",
    "routed_experts_prompt_start": "leave it out; all that is asked for is sent",
    "suffix": "put what follows into the prompt, in the model's own format",
    "truncate_prompt_tokens": "shorten the prompt",
    "truncation_side": "leave it out; truncate_prompt_tokens keeps the last tokens",
    "use_beam_search": "leave it out; only sampling is supported",
    "verbosity": "ask for it in the messages",
    "vllm_xargs": "leave it out; the server has no extensions",
    "web_search_options": "leave it out; the server has no web access",
}
#: Values of refused fields that ask for nothing, as clients send them that fill in defaults.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "add_special_tokens": False,
    "echo": False,
    "guided_decoding_backend": "xgrammar",
    "length_penalty": 1.0,
    "modalities": ["text"],
    "priority": 0,
    "return_mm_kwargs": True,
    "return_prompt_text": False,
    "return_token_offsets": False,
    "routed_experts_prompt_start": 0,
    "suffix": "",
    "truncation_side": "left",
    "use_beam_search": False,
    "verbosity": "medium",
}
_IN_CHATS = "use /v1/chat/completions"
#: Fields of ``SamplingFields`` that other APIs than completions and chats have not.
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_regex"), "use structured_outputs"),
    **dict.fromkeys(("prompt_logprobs", "return_token_ids"), _IN_CHATS),
    "return_tokens_as_token_ids": _IN_CHATS,
}


def null_is(default: Any) -> BeforeValidator:
    """For a field that may be null, as in OpenAI's API, with the meaning of its default."""
    return BeforeValidator(lambda given: default if given is None else given)


def _whole(given: Any) -> Any:
    """A whole float as an integer: JSON has one kind of number, and some write 4 as 4.0."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[Whole, Field(ge=0, lt=2**31)]
#: The likeliest tokens of a position that are returned.
Candidates = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
#: The number of answers, where there is one. A Literal would take true, which equals 1.
One = Annotated[Whole, Field(ge=1, le=1), null_is(default=1)]
#: Of the answer in a conversation.
Limit = Annotated[Whole, Field(ge=1, lt=2**31)]
#: Tokens of reasoning; -1: any number.
Budget = Annotated[Whole, Field(ge=-1, lt=2**31)]
#: Tokens that are kept of a prompt; -1: all that fit.
Kept = Annotated[Whole, Field(ge=-1, lt=2**31)]
# fail_fast: an invalid list costs no more than a valid one.
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_N, fail_fast=True)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]

#: An answer's id, behind its prefix.
RequestId = Annotated[str, Field(min_length=1, max_length=256)]

#: How much a model is to reason.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompts = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_N, fail_fast=True)],
    # Each type is given up at its first fault.
    Field(union_mode="left_to_right"),
]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: Annotated[bool, null_is(default=False)] = False
    continuous_usage_stats: Annotated[bool, null_is(default=False)] = False
    include_obfuscation: Annotated[bool, null_is(default=False)] = False


class Speculative(Strict):
    """Speculation of one request: the maximum of drafts per step; 0 turns it off."""

    num_speculative_tokens: Count


class StructuredOutputsField(BaseModel):
    """The constraint of the answer, with vLLM's names; exactly one of them."""

    model_config = ConfigDict(strict=True, extra="allow")

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class JsonSchemaFormat(Given):
    """OpenAI's wrapping of a JSON Schema."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """The constraint of the answer in OpenAI's format, with three more types.

    A structural tag's keys stand beside its type, as in vLLM.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class SamplingFields(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="allow")
    refused: ClassVar[Mapping[str, str]] = REFUSED_FIELDS
    ignored: ClassVar[frozenset[str]] = IGNORED_FIELDS
    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_VALUES
    #: Fields of other endpoints, with what to use instead.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_N), null_is(default=1)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    min_tokens: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: (
        StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ) = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: (
        BadWord | Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None
    ) = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Candidates | None = None
    thinking_token_budget: Budget | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    speculative: Speculative | None = None
    include_speculation_stats: bool | Literal["detailed"] = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def formats_text(self) -> bool:
        """Whether ``response_format`` constrains a text."""
        return self.response_format is not None and self.response_format.type != "text"

    def check_fields(self, num_prompts: int) -> None:
        """Refuse unsupported fields by name.

        Raises:
            ApiError: a field is unknown or refused, ``stream_options`` come without a stream,
                or detailed statistics are requested for several completions.
        """
        for name in sorted(self.model_fields_set & self.elsewhere.keys()):
            if getattr(self, name) not in (None, type(self).model_fields[name].default):
                raise _unsupported(name, self.elsewhere[name])
        extra = self.model_extra or {}
        # Benchmarks that know SGLang's servers too name an adapter twice.
        neutral = {**self.neutral, "lora_path": self.model}
        if len(extra) > MAX_EXTRA:
            raise invalid(f"the request has {len(extra)} unknown fields. See /docs")
        for name, value in extra.items():
            if name in self.ignored or value in (None, neutral.get(name)):
                continue
            if name in self.refused:
                raise _unsupported(name, self.refused[name])
            self.meet_unknown(name)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options need stream. Set stream to true", "stream_options")
        if self.include_speculation_stats == DETAILED and num_prompts * self.n > 1:
            raise invalid(
                "detailed statistics need a single completion. Send one prompt with n=1",
                "include_speculation_stats",
            )

    def meet_unknown(self, name: str) -> None:
        """Refuse an unknown field.

        Raises:
            ApiError: always, with the known field that is spelled most alike.
        """
        close = closest(name, type(self).model_fields)
        hint = f"Did you mean {close!r}? " if close is not None else ""
        raise invalid(f"unknown field {shown(name)}. {hint}See /docs for the known ones", name)


def _unsupported(name: str, remedy: str) -> ApiError:
    return invalid(f"{name} is not supported: {remedy}", name, "unsupported")


class CompletionRequest(SamplingFields):
    """Continue one prompt or several."""

    prompt: Prompts
    max_tokens: Count | None = 16
    max_completion_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Candidates | None = None
    best_of: Whole | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Kept | None = None
    request_id: RequestId | None = None


class Message(BaseModel):
    """One message; other fields are passed to the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: (
        str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)] | None
    ) = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: (
        Annotated[list[EarlierCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: str | None = None


def require_few_calls(calls: Sized, param: str) -> None:
    """Refuse more calls than a message may have, where a turn of another API becomes one.

    Raises:
        ApiError: there are more; ``param`` is the field that has them.
    """
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(
            f"a turn of the assistant has {len(calls)} calls and at most {MAX_TOOL_CALLS} are "
            "allowed. Send fewer",
            param,
        )


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """The variables by which chat templates turn reasoning on or off."""
    # DeepSeek-V3.1's template has the second name.
    return {"enable_thinking": thinks, "thinking": thinks}


class ChatRequest(SamplingFields):
    """Answer a conversation."""

    messages: Messages
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Candidates | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    truncate_prompt_tokens: Kept | None = None
    request_id: RequestId | None = None

    @classmethod
    def of(cls, request: SamplingFields, **fields: Any) -> ChatRequest:
        """The chat request of another API's, whose values have been validated."""
        sampling = {name: getattr(request, name) for name in SamplingFields.model_fields}
        return cls.model_construct(**sampling | fields)

    @property
    def may_call(self) -> bool:
        """Whether the model decides about calls."""
        return self._mode in (None, "auto")

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self._mode not in (None, "none", "auto")

    @property
    def _mode(self) -> Any:
        choice = self.tool_choice
        return choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables for the chat template; an effort also turns thinking on or off."""
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return given
        effort = self.reasoning_effort
        return {**thinking_variables(effort != "none"), **given, "reasoning_effort": effort}


class _TokenRequest(Strict):
    """A request of token ids; unknown fields may be null, as in ``SamplingFields``."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {name: one for name, one in given.items() if one is not None or name in known}


class TokenizeRequest(_TokenRequest):
    """A text, or a conversation to be rendered by the chat template."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool, null_is(default=False)] = False


class DetokenizeRequest(_TokenRequest):
    """Token ids."""

    tokens: TokenIds

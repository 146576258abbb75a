"""Sampling parameters and structured outputs from the fields of a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sametoken.engine.sampling_defaults import ServerDefaults
from sametoken.engine.user_inputs import TOO_LONG
from sametoken.errors import RequestError, shown
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.schemas import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
    StructuredOutputsField,
)
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import PARAM, REFUSED, StructuredOutputs

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
#: Fields whose names and meanings are those of ``SamplingParams``.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "prompt_logprobs",
    "thinking_token_budget",
)


def completion_params(
    request: CompletionRequest, defaults: ServerDefaults, structured: StructuredOutputs | None
) -> SamplingParams:
    """Parameters of a completion request.

    With ``echo``, ``max_tokens`` may be 0: the engine makes one token, which is not sent.

    Raises:
        ApiError: fields contradict each other.
        RequestError: a value is out of range.
    """
    if request.best_of is not None and request.best_of != request.n:
        raise invalid("best_of is not supported, unless it equals n. Leave it out", "best_of")
    if request.max_completion_tokens not in (None, request.max_tokens):
        raise invalid(
            "max_completion_tokens is not supported, unless it equals max_tokens. Use max_tokens",
            "max_completion_tokens",
        )
    max_tokens = request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1
    values = {"max_tokens": defaults.max_tokens(max_tokens), "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs not in (None, request.logprobs):
            raise invalid(
                "echo with logprobs reports the prompt's too. Leave prompt_logprobs out",
                "prompt_logprobs",
            )
        values["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, structured, values)


def chat_params(
    request: ChatRequest, defaults: ServerDefaults, structured: StructuredOutputs | None
) -> SamplingParams:
    """Parameters of a chat request; by default the answer may fill the context.

    Raises:
        ApiError: fields contradict each other.
        RequestError: a value is out of range.
    """
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_tokens and max_completion_tokens differ. Send one", "max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs need logprobs. Set logprobs to true", "top_logprobs")
    return _params(
        request,
        defaults,
        structured,
        {
            "max_tokens": defaults.max_tokens(next(iter(limits), None)),
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        },
    )


def _params(
    request: SamplingFields,
    defaults: ServerDefaults,
    structured: StructuredOutputs | None,
    values: dict[str, Any],
) -> SamplingParams:
    given = {name: getattr(request, name) for name in _SAME}
    given = {name: value for name, value in given.items() if value is not None}
    if request.logit_bias:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    if request.speculative is not None:
        given["num_speculative_tokens"] = request.speculative.num_speculative_tokens
    if structured is not None:
        given["structured_outputs"] = structured
    return replace(defaults.params, **{**values, **given})


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        # ``int`` also accepts spaces, signs, underscores, and digits of other scripts.
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(
                f"logit_bias has the key {shown(key)}, not a token id. Use integers as keys",
                "logit_bias",
            )
    return {int(token_id): bias for token_id, bias in biases.items()}


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """The constraint of a request, from any of the fields for it.

    Raises:
        ApiError: two fields have a constraint, or one is invalid.
        RequestError: the constraint is empty.
    """
    found = {
        name: constraint
        for name, constraint in (
            ("response_format", _of_response_format(request.response_format)),
            ("structured_outputs", _of_field(request.structured_outputs)),
            ("guided_json", _given("json_schema", request.guided_json)),
            ("guided_regex", _given("regex", request.guided_regex)),
            ("guided_choice", _given("choice", request.guided_choice)),
            ("guided_grammar", _given("grammar", request.guided_grammar)),
        )
        if constraint is not None
    }
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{first} and {second} contradict each other. Send one of them", second)
    return next(iter(found.values()), None)


@contextmanager
def named_as_sent(request: SamplingFields) -> Iterator[None]:
    """Have errors of the engine's parameters name the fields that the client sent."""
    try:
        yield
    except RequestError as error:
        if error.param == PARAM:
            error.param = _constraint_field(request)
        elif error.param == "logprobs" and isinstance(request, ChatRequest):
            error.param = "top_logprobs"
        elif error.param == "prompt_token_ids" or error.code == TOO_LONG:
            error.param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise


def _constraint_field(request: SamplingFields) -> str:
    """The field that has a request's constraint; a forced call's is that of its tools."""
    if isinstance(request, ChatRequest) and request.forces_call:
        return "tools"
    if request.formats_text:
        return "response_format"
    fields = ("structured_outputs", "guided_json", "guided_regex", "guided_choice")
    sent = (name for name in (*fields, "guided_grammar") if getattr(request, name) is not None)
    return next(sent, "tools")


_KEYS_OF_TAG = ("format", "structures", "triggers")


def _of_response_format(requested: ResponseFormat | None) -> StructuredOutputs | None:
    if requested is None:
        return None
    kind = requested.type
    own = _KEYS_OF_TAG if kind == "structural_tag" else (kind,)
    for key, value in requested:
        if key not in ("type", *own) and value is not None:
            cause = f"response_format of type {kind} has no {key!r}"
            raise invalid(f"{cause}. Send the type that it belongs to", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=requested.model_dump(exclude_none=True))
    value = getattr(requested, kind)
    if value is None:
        raise invalid(f"response_format of type {kind} lacks {kind!r}. Add it", "response_format")
    return _given(kind, value.schema_ if kind == "json_schema" else value)


def _of_field(field: StructuredOutputsField | None) -> StructuredOutputs | None:
    if field is None:
        return None
    for name, value in (field.model_extra or {}).items():
        _require_neutral(name, value)
    choice = None if field.choice is None else tuple(field.choice)
    return StructuredOutputs(
        json_schema=field.json_,
        json_object=bool(field.json_object),
        regex=field.regex,
        grammar=field.grammar,
        choice=choice,
        structural_tag=field.structural_tag,
    )


def _require_neutral(name: str, value: Any) -> None:
    """Refuse a key of ``structured_outputs``, unless it is vLLM's and asks for nothing."""
    if name not in REFUSED:
        raise invalid(f"structured_outputs has no {shown(name)}. See /docs", PARAM)
    if value not in (None, False):
        raise invalid(f"structured_outputs.{name} is not supported: {REFUSED[name]}", PARAM)


def _given(kind: str, value: Any) -> StructuredOutputs | None:
    return None if value is None else StructuredOutputs(**{kind: value})

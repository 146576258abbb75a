"""From the fields of a request to sampling parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from sametoken.core.sampling_params import SamplingParams
from sametoken.core.structured_outputs import StructuredOutputs
from sametoken.errors import shown
from sametoken.server.errors import invalid
from sametoken.server.schemas import ChatRequest, CompletionRequest, SamplingFields

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
)


def completion_params(
    request: CompletionRequest, defaults: SamplingParams, structured: StructuredOutputs | None
) -> SamplingParams:
    """Parameters of a completion request.

    With ``echo``, 0 tokens may be asked for: the one that the engine makes is not shown.

    Raises:
        ApiError: fields contradict each other.
        RequestError: a value is out of range.
    """
    if request.best_of is not None and request.best_of != request.n:
        raise invalid(f"best_of is not supported. Leave it out, or use n={request.n}", "best_of")
    max_tokens = request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1
    values = {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs not in (None, request.logprobs):
            raise invalid(
                "echo with logprobs reports the prompt's too. Leave prompt_logprobs out",
                "prompt_logprobs",
            )
        values["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, structured, values)


def chat_params(
    request: ChatRequest, defaults: SamplingParams, structured: StructuredOutputs | None
) -> SamplingParams:
    """Parameters of a chat request; without a limit the answer may fill the context.

    Raises:
        ApiError: fields contradict each other.
        RequestError: a value is out of range.
    """
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_tokens and max_completion_tokens differ. Send one", "max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs need logprobs. Set logprobs to true", "top_logprobs")
    return _params(
        request,
        defaults,
        structured,
        {
            "max_tokens": next(iter(limits), None),
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        },
    )


def _params(
    request: SamplingFields,
    defaults: SamplingParams,
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
    return replace(defaults, **{**values, **given})


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        # ``int`` also takes spaces, signs, underscores, and digits of other scripts.
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(
                f"logit_bias has the key {shown(key)}, which is no token id. Use integers as keys",
                "logit_bias",
            )
    return {int(token_id): bias for token_id, bias in biases.items()}

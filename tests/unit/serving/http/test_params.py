from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sametoken.engine.sampling_defaults import ServerDefaults
from sametoken.errors import RequestError
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.params import chat_params, completion_params, structured_outputs
from sametoken.serving.http.schemas import ChatRequest, CompletionRequest
from sametoken.types.sampling_params import SamplingParams

DEFAULTS = ServerDefaults(SamplingParams(temperature=0.6, top_k=20, max_tokens=None))
EVERY = {
    "n": 2,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "min_tokens": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "stop": ("a", "b"),
    "stop_token_ids": (3,),
    "bad_words": ("no",),
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": (1, 2),
    "prompt_logprobs": 2,
    "thinking_token_budget": 5,
    "logit_bias": {5: -1.5},
    "max_tokens": 9,
    "logprobs": 4,
}
PAGE = Path(__file__).parents[4] / "docs" / "server.md"
OPENAI = {
    *("model", "prompt", "messages", "n", "temperature", "top_p", "seed", "stop", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "max_completion_tokens", "echo"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "tools", "reasoning_effort"),
}


def test_the_page_names_every_field_that_is_not_openai_s():
    named = set(re.findall(r"`(\w+)[`:]", PAGE.read_text(encoding="utf-8")))
    assert {*CompletionRequest.model_fields, *ChatRequest.model_fields} - OPENAI <= named


def completion(defaults=DEFAULTS, **fields) -> SamplingParams:
    request = CompletionRequest(prompt="x", **fields)
    return completion_params(request, defaults, structured_outputs(request))


def chat(defaults=DEFAULTS, **fields) -> SamplingParams:
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
    return chat_params(request, defaults, structured_outputs(request))


def test_every_field_arrives():
    assert {one.name for one in dataclasses.fields(SamplingParams)} - EVERY.keys() == {
        *("detokenize", "structured_outputs", "num_speculative_tokens")
    }
    given = EVERY | {"logit_bias": {"5": -1.5}, "speculative": {"num_speculative_tokens": 0}}
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    assert completion(**given) == SamplingParams(**EVERY, num_speculative_tokens=0)


def test_the_model_s_recommendation_holds_where_nothing_is_given():
    assert completion() == SamplingParams(temperature=0.6, top_k=20, max_tokens=16)
    assert chat() == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)
    assert completion(temperature=0.0).top_k == 20


def test_max_new_tokens_of_the_model_or_the_server_s_owner_limits_requests():
    of_model = ServerDefaults(SamplingParams(max_tokens=40))
    found = chat(of_model), chat(of_model, max_tokens=50), completion(of_model)
    assert [one.max_tokens for one in found] == [40, 50, 16]
    assert completion(of_model, max_tokens=None).max_tokens == 40
    of_owner = ServerDefaults(SamplingParams(max_tokens=10), most_tokens=10)
    found = chat(of_owner), chat(of_owner, max_completion_tokens=50), completion(of_owner)
    assert [one.max_tokens for one in found] == [10, 10, 10]
    assert completion(of_owner, max_tokens=7).max_tokens == 7


def test_chat_s_own_names():
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_echo_with_logprobs_asks_for_the_prompt_s():
    params = completion(echo=True, logprobs=2, max_tokens=0)
    assert (params.prompt_logprobs, params.max_tokens) == (2, 1)
    assert completion(echo=True, prompt_logprobs=3).prompt_logprobs == 3


def test_a_completion_s_limit_may_stand_under_the_name_of_chats_too():
    """GuideLLM 0.2 sends both."""
    both = {"max_tokens": 9, "max_completion_tokens": 9}
    CompletionRequest(prompt="x", **both).check_fields(1)
    assert completion(**both).max_tokens == 9


@pytest.mark.parametrize(
    ("of", "fields", "param"),
    [
        (completion, {"best_of": 3}, "best_of"),
        (completion, {"max_tokens": 9, "max_completion_tokens": 8}, "max_completion_tokens"),
        (completion, {"max_completion_tokens": 8}, "max_completion_tokens"),
        (completion, {"logit_bias": {"word": 1.0}}, "logit_bias"),
        (completion, {"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_contradictions_name_their_field(of, fields, param):
    with pytest.raises(ApiError) as caught:
        of(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "Did you mean 'temperature'? See"), ("q" * 4000, "'. See /docs")],
)
def test_an_unknown_field_is_named_beside_what_is_spelled_alike(name, hint):
    with pytest.raises(ApiError, match="unknown field") as caught:
        CompletionRequest(prompt="x", **{name: 1}).check_fields(1)
    assert hint in str(caught.value)


@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"max_tokens": 0}, {"top_p": 2.0}])
def test_impossible_values_are_the_request_s_error(fields):
    with pytest.raises(RequestError):
        completion(**fields)


SCHEMA = {"type": "object"}
GRAMMAR = "root ::= x"


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            '{"type": "object"}',
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+"),
        (
            {"response_format": {"type": "grammar", "grammar": "root ::= x"}},
            "grammar",
            "root ::= x",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "any_text"}}',
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        # As vLLM's own class of these options is sent, with all of its defaults.
        (
            {
                "structured_outputs": {
                    "regex": "a+",
                    "choice": None,
                    "disable_any_whitespace": False,
                    "whitespace_pattern": None,
                    "structural_tag": None,
                }
            },
            "regex",
            "a+",
        ),
        ({"guided_json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", ("a",)),
        ({"guided_grammar": GRAMMAR}, "grammar", GRAMMAR),
    ],
)
def test_every_way_to_ask_for_a_form(fields, kind, value):
    constraint = chat(**fields).structured_outputs
    assert constraint.kind == kind
    assert getattr(constraint, kind) == value


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"disable_any_whitespace": True}, "disable_any_whitespace is not supported: use regex"),
        ({"whitespace_pattern": " "}, "whitespace_pattern is not supported: use regex"),
        ({"regexp": None}, "structured_outputs has no 'regexp'"),
    ],
)
def test_options_of_a_form_that_are_not_offered(more, cause):
    with pytest.raises(ApiError, match=cause) as refused:
        chat(structured_outputs={"json": SCHEMA, **more})
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("json_object", "format", {"type": "any_text"}),
        ("text", "regex", "a"),
        ("structural_tag", "grammar", GRAMMAR),
    ],
)
def test_keys_of_another_type_of_answer_are_refused(kind, key, value):
    with pytest.raises(ApiError, match=f"type {kind} has no '{key}'") as refused:
        chat(response_format={"type": kind, key: value})
    assert refused.value.param == "response_format"


def test_no_form_and_two_forms():
    assert chat(response_format={"type": "text"}).structured_outputs is None
    with pytest.raises(ApiError, match="guided_regex"):
        chat(response_format={"type": "json_object"}, guided_regex="a")
    with pytest.raises(ApiError, match="lacks 'regex'"):
        chat(response_format={"type": "regex"})
    with pytest.raises(RequestError):
        chat(guided_regex="")

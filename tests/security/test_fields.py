"""Fields of the wrong type, form or size are refused by name: offline, and over HTTP with 400."""

from __future__ import annotations

import itertools
import json
import re
import time

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_engine import FakeEngine
from sametoken.engine.user_inputs import (
    PromptTokens,
    conversations_of,
    params_of,
    plain_messages,
    prompts_of,
)
from sametoken.errors import RequestError, shown
from sametoken.serving.http.app import create_app
from sametoken.serving.http.body import read_model
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.messages_api.request import MessagesRequest
from sametoken.serving.http.responses_api.request import ResponsesRequest
from sametoken.serving.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sametoken.types.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)

INPUTS = FakeEngine()._inputs
JSON = {"Content-Type": "application/json"}
NAMES = sorted(SamplingParams.__dataclass_fields__)
LONG = 100_000
MESSAGE = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.just(-(10**5000)),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(
        st.one_of(st.integers(-5, 5), st.text(max_size=2), st.floats(), st.none()), max_size=3
    ),
    st.dictionaries(st.one_of(st.integers(-5, 5), st.text(max_size=2)), st.floats(), max_size=3),
    st.builds(object),
    st.sampled_from([int, len, np.float32(1), np.array(3), np.arange(3), torch.arange(2), {"a"}]),
    st.builds(itertools.count),
)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine):
    app = create_app(engine, ServerConfig())
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def refused(client, body, path="/v1/completions") -> str:
    """The message of a 400 in OpenAI's shape."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 3000
    return error["message"]


# Offline


def fault_of(params: dict) -> RequestError | None:
    """Why a request with these parameters is refused; any other error is a defect."""
    try:
        chosen = SamplingParams(**params).of_completion(1)
        INPUTS.process("r", PromptTokens(None, (1,)), chosen)
    except RequestError as error:
        return error
    return None


@settings(max_examples=400)
@given(name=st.sampled_from(NAMES), value=VALUES)
def test_a_parameter_of_any_type_is_taken_or_refused_by_name(name, value):
    error = fault_of({name: value})
    if error is not None:
        assert name in str(error)
        assert error.remedy
        assert len(str(error)) < 500


@pytest.mark.parametrize(
    "params",
    [
        {"stop": 5},
        {"stop": b"ab"},
        {"stop_token_ids": 5},
        {"stop_token_ids": [True]},
        {"allowed_token_ids": "abc"},
        {"logit_bias": [1]},
        {"logit_bias": {1: 10**400}},
        {"bad_words": {"a": 1}},
        {"bad_words": 5},
        {"temperature": 10**400},
        {"n": 10**9},
        {"ignore_eos": "no"},
        {"detokenize": 1},
        {"top_k": np.arange(2)},
        {"stop_token_ids": itertools.count()},
        {"stop": itertools.repeat("a")},
        {"stop": ["a"] * (MAX_STOPS + 1)},
        {"stop": "a" * (MAX_STOP_CHARS + 1)},
        {"bad_words": ["a"] * (MAX_BAD_WORDS + 1)},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
    ],
    ids=lambda params: next(iter(params)),
)
def test_wrong_types_and_sizes_are_refused_by_name(params):
    (name,) = params
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**params)
    assert caught.value.remedy


def test_one_bad_word_alone_is_one_word():
    assert SamplingParams(bad_words="abc").bad_words == ("abc",)


@pytest.mark.parametrize("given_prompts", [None, 5, 1.5, object(), b"text", len])
def test_what_is_no_list_of_prompts_is_refused_by_name(given_prompts):
    with pytest.raises(RequestError, match="prompts of type"):
        prompts_of(given_prompts)
    with pytest.raises(RequestError, match="messages of type"):
        conversations_of(given_prompts)
    with pytest.raises(RequestError, match="messages of type"):
        plain_messages(given_prompts)
    with pytest.raises(RequestError, match="sampling parameters of type"):
        params_of(given_prompts, 1)


def test_prompts_and_conversations_may_come_from_an_iterator():
    message = {"role": "user", "content": "x"}
    assert prompts_of(iter(["a", "b"])) == ["a", "b"]
    assert conversations_of(iter([message])) == [[message]]
    assert plain_messages(iter([message])) == [message]
    assert conversations_of(iter([[message], [message]])) == [[message], [message]]


@pytest.mark.parametrize(
    "token_ids",
    [
        itertools.count(),
        np.array(3),
        torch.tensor(3),
        np.linspace(0, 1, 3),
        torch.rand(3),
        torch.ones(2, 2, dtype=torch.int64),
        [10**5000],
        [True],
        ["1"],
        [None],
        [1] * 512,
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_of_other_kinds_are_refused_by_name(engine, token_ids):
    def process():
        prompt = engine._inputs.tokenize({"prompt_token_ids": token_ids})
        engine._inputs.process("r", prompt, SamplingParams())

    with pytest.raises(RequestError) as caught:
        process()
    assert "prompt" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    text = "a" * 1_000_000
    with pytest.raises(RequestError, match="1000000 characters"):
        engine._inputs.tokenize(text)
    with pytest.raises(RequestError, match="1000000 characters"):
        engine._inputs.tokenize_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    "value",
    ["a" * LONG, 10**LONG, [1] * LONG, {"k" * LONG: 1}, b"a" * LONG, object()],
    ids=lambda value: type(value).__name__,
)
def test_a_message_shows_little_of_any_value(value):
    assert len(shown(value)) <= 200


def test_a_value_whose_methods_fail_can_be_shown():
    class Broken:
        def __repr__(self):
            raise ZeroDivisionError

    class array(list):
        """Named like one that reprlib knows."""

    assert "Broken" in shown(Broken())
    assert shown(array())


# Over HTTP


@pytest.mark.parametrize("name", ["self", "messages", "tokenize"])
def test_template_variables_of_the_server_s_own_are_refused(client, name):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
    assert "chat_template_kwargs" in refused(client, body, "/v1/chat/completions")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [('{"a":' * 100_000, "members, objects and lists"), ('{"a": 1e400}', "not finite")],
)
def test_arguments_beyond_a_bound_are_refused(client, arguments, cause):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert cause in refused(client, {"messages": [message]}, "/v1/chat/completions")


CHAT = '{"messages": [{"role": "user", "content": "x"}], %s}'


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 400])
@pytest.mark.parametrize(
    "field",
    [
        '"temperature": %s',
        '"logit_bias": {"1": %s}',
        '"chat_template_kwargs": {"a": [%s]}',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]',
        '"metadata": {"a": %s}',
        '"guided_json": {"minimum": %s}',
    ],
)
def test_numbers_that_are_not_finite_are_refused_anywhere(client, field, number):
    refused(client, (CHAT % (field % number)).encode(), "/v1/chat/completions")


def test_large_numbers_that_are_finite_are_taken(client):
    body = CHAT % '"metadata": {"a": [1e300, 1E+100, 1e-400]}'
    answer = client.post("/v1/chat/completions", content=body.encode(), headers=JSON)
    assert answer.status_code == 200


@pytest.mark.parametrize("key", [" 5 ", "1_0", "٣", "+5", "-1", "05", "", "5.0", "9" * 5000])
def test_keys_of_logit_bias_are_plain_token_ids(client, key):
    assert "logit_bias" in refused(client, {"prompt": "x", "logit_bias": {key: 1.0}})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "%s"}'),
        ("/v1/completions", '{"prompt": ["%s"]}'),
        ("/v1/completions", '{"prompt": "x", "stop": ["%s"]}'),
        ("/v1/completions", '{"prompt": "x", "guided_regex": "%s"}'),
        ("/v1/completions", '{"prompt": "x", "%s": 1}'),
        ("/v1/completions", '{"prompt": "x", "logit_bias": {"%s": 1}}'),
        ("/v1/chat/completions", '{"messages": [{"role": "%s", "content": "x"}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "%s"}]}'),
        ("/v1/chat/completions", CHAT % '"model": "%s"'),
        ("/v1/chat/completions", CHAT % '"chat_template_kwargs": {"a": "%s"}'),
        ("/tokenize", '{"prompt": "%s"}'),
    ],
)
def test_half_of_a_character_is_refused_anywhere(client, path, body):
    refused(client, (body % "\\ud800").encode(), path)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "model": "m" * LONG},
        {"prompt": "x", "f" * LONG: 1},
        {"prompt": "x", "logit_bias": {"k" * LONG: 1.0}},
        {"prompt": "x", "logit_bias": {"k" * LONG: "a"}},
        {"prompt": "x", "stop": ["s" * LONG]},
        {"prompt": "x", "guided_regex": "(" * LONG},
        {"prompt": "x", "guided_choice": []},
        {"prompt": "x", "stream_options": {"o" * LONG: 1}},
        {"prompt": "x", "response_format": {"type": "t" * LONG}},
    ],
    ids=lambda body: list(body)[-1][:20],
)
def test_no_answer_repeats_what_the_client_sent(client, body):
    content = json.dumps(body).encode()
    answer = client.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 1500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * (MAX_STOPS + 1)}),
        ("/v1/completions", {"prompt": "x", "bad_words": ["a"] * (MAX_BAD_WORDS + 1)}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 1025}),
        ("/v1/completions", {"prompt": "x", "guided_choice": ["a"] * 4097}),
        ("/v1/completions", {"prompt": "x", "n": 2**16 + 1}),
        ("/v1/completions", {"prompt": "x", **dict.fromkeys(map(str, range(65)))}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 8193}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 8193}]}),
        ("/v1/completions", {"prompt": "x", "metadata": [[]] * 2**16}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 8193}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{}] * 8193}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f"}] * 129}),
        ("/v1/responses", {"input": "x", "include": ["x"] * 8193}),
        ("/v1/responses", {"input": "x", "metadata": dict.fromkeys(map(str, range(8193)), "")}),
        ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": "x"}] * 8193}),
        ("/v1/messages", MESSAGE | {"system": [{"type": "text", "text": ""}] * 8193}),
        ("/v1/messages", MESSAGE | {"tools": [{"name": "f", "input_schema": {}}] * 129}),
        ("/v1/messages", MESSAGE | {"stop_sequences": ["a"] * (MAX_STOPS + 1)}),
        ("/v1/messages", MESSAGE | {"metadata": [[]] * 2**16}),
        ("/v1/messages", MESSAGE | dict.fromkeys(map(str, range(65)))),
    ],
)
def test_lists_beyond_their_bounds_are_refused(client, path, body):
    refused(client, body, path)


def test_the_schema_names_the_bounds(client):
    document = client.get("/openapi.json").json()["components"]["schemas"]
    stop = document["CompletionRequest"]["properties"]["stop"]["anyOf"]
    assert stop[0]["maxLength"] == MAX_STOP_CHARS
    assert stop[1]["maxItems"] == MAX_STOPS
    assert document["ChatRequest"]["properties"]["messages"]["maxItems"] == 8192


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"prompt": ' + b'{"a":' * 60_000])
def test_deep_nesting_is_refused_at_once(client, body):
    began = time.monotonic()
    refused(client, body)
    assert time.monotonic() - began < 5


WRONG = [
    *(None, True, -1, 1.5, 2**70, "x", "\ud800", "x" * 300, [], [1], ["\ud800"], ["x", 1]),
    *([[1, "x"]], {}, {"x": 1}, [{}], [None], {"type": "x"}, [{"role": 1}], {"json": 1}),
    *([{"role": "u", "content": [1]}], {"type": "function", "function": 1}, [[["x"]]]),
    *([{"role": "u", "tool_calls": [{"function": {"name": 1}}]}], {"num_speculative_tokens": "x"}),
    {"type": "json_schema", "json_schema": {"schema": 1}},
]
INTERNAL = re.compile(r"0x[0-9a-f]{3}|[\[<]|function-|\.(str|bool|int|dict|[A-Z]\w+)\b")


JSON_TYPES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}}
REQUESTS = [
    (CompletionRequest, {"prompt": "a"}),
    (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    (ResponsesRequest, {"input": "x"}),
    (MessagesRequest, MESSAGE),
    (TokenizeRequest, {"prompt": "a"}),
    (DetokenizeRequest, {"tokens": [1]}),
]


@pytest.mark.parametrize(("model", "base"), REQUESTS)
def test_no_refusal_shows_what_the_server_is_made_of(model, base):
    refusals = 0
    for name, value in itertools.product(model.model_fields, WRONG):
        texts = (json.dumps(base | {name: value}, ensure_ascii=ascii) for ascii in (True, False))
        for error in (refusal_of(model, text) for text in texts):
            if error is None:
                continue
            refusals += 1
            assert not INTERNAL.search(str(error)), str(error)
            assert error.param in (name, None)
            assert error.param or str(error).startswith("the body is not JSON")
    assert refusals > 2 * len(WRONG)


@pytest.mark.parametrize(("model", "base"), REQUESTS)
def test_a_field_takes_only_the_types_of_its_schema(model, base):
    schema = model.model_json_schema()
    for name, value in itertools.product(schema["properties"], (True, 1, 1.5, "x")):
        allowed = types_of(schema["properties"][name], schema.get("$defs", {}))
        if not allowed & JSON_TYPES[type(value)]:
            refusal = refusal_of(model, json.dumps(base | {name: value}))
            assert refusal is not None, (name, value)
            assert refusal.param == name


def types_of(schema, definitions) -> set[str]:
    """The JSON types that a schema allows, in every branch."""
    if "$ref" in schema:
        return types_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return set().union(*(types_of(one, definitions) for one in branches))
    return {schema["type"]}


def refusal_of(model, text: str) -> ApiError | None:
    try:
        read_model(model, text.encode("utf-8", "surrogatepass"))
    except ApiError as error:
        return error
    return None

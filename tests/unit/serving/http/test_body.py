from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.serving.http.body import (
    MAX_DIGITS,
    MAX_NODES,
    _without_strings,
    read_json,
    read_model,
)
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.messages_api.request import MessagesRequest
from sametoken.serving.http.responses_api.request import ResponsesRequest
from sametoken.serving.http.schemas import ChatRequest, CompletionRequest

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # The surrogates aside, since they are no text.
    | st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('"\\[{:,eN')),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\é[', max_size=3), inner)
    ),
    max_leaves=12,
)


@given(VALUES, st.booleans())
def test_a_value_is_read_as_it_was_written(value, ascii_only):
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ([-1], "prompt.0: Input should be greater than or equal to 0"),
        ([1, "a"], "prompt.1: Input should be a valid integer"),
        (["a", 1], "prompt.1: Input should be a valid string"),
        ([[1], "a"], "prompt.1: Input should be a valid array"),
        ([[1], [2, "a"]], "prompt.1.1: Input should be a valid integer"),
        (5, "prompt: Input should be a valid string"),
    ],
)
def test_a_prompt_s_fault_is_that_of_the_closest_type(prompt, cause):
    with pytest.raises(ApiError) as caught:
        read_model(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert (str(caught.value), caught.value.param) == (cause, "prompt")


@pytest.mark.parametrize(
    "model", [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest]
)
@pytest.mark.parametrize("value", [5, [[[]]]])
def test_the_place_of_a_fault_is_one_of_the_body_without_the_types_of_a_union(model, value):
    for name in model.model_fields:
        with pytest.raises(ApiError) as caught:
            read_model(model, json.dumps({name: value}).encode())
        place, _, _ = str(caught.value).partition(": ")
        if caught.value.param == name:
            assert set(place.removeprefix(name).split(".")) <= {"", "0"}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, ("max_tokens", "n", "top_k", "seed", "logprobs", "min_tokens")),
        (ChatRequest, ("max_completion_tokens", "n", "top_logprobs", "prompt_logprobs")),
        (ResponsesRequest, ("max_output_tokens", "n", "top_k", "top_logprobs")),
        (MessagesRequest, ("max_tokens", "top_k")),
    ],
)
def test_a_whole_number_may_have_a_fraction_of_0(model, fields):
    needed = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    needed = {name: value for name, value in needed.items() if name in model.model_fields}
    needed |= {"model": "m", "max_tokens": 5} if model is MessagesRequest else {}
    for name in fields:
        body = json.dumps(needed | {name: 1.0}).encode()
        value = getattr(read_model(model, body), name)
        assert (value, type(value)) == (1, int)
        for other in (1.5, "1", True):
            with pytest.raises(ApiError) as caught:
                read_model(model, json.dumps(needed | {name: other}).encode())
            assert caught.value.param == name


@given(st.lists(st.text('"\\[{:1e9', max_size=8), max_size=4))
def test_what_stands_in_strings_is_not_looked_at(texts):
    body = json.dumps(texts).encode()
    assert _without_strings(body).count(b"[") == 1
    assert b"{" not in _without_strings(body)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"[" + b"[]," * MAX_NODES + b"1]", "members, objects and lists"),
        (b"{" + b'"a":1,' * (MAX_NODES + 1) + b"}", "members, objects and lists"),
        (b"9" * (MAX_DIGITS + 1), "digits"),
        (b"[0." + b"0" * MAX_DIGITS + b"1]", "digits"),
        (b"[1e309]", "not finite"),
        (b"[-1.5E+00400]", "not finite"),
        (b"9" * MAX_DIGITS + b"e400", "not finite"),
        (b"[NaN]", "not finite"),
        (b"-Infinity", "not finite"),
    ],
)
def test_what_is_beyond_a_bound_is_refused(body, cause):
    with pytest.raises(ValueError, match=cause):
        read_json(body)
    in_any_field = b'{"messages": [], "tools": %b}' % body
    with pytest.raises(ApiError, match=cause):
        read_model(ChatRequest, in_any_field)


@pytest.mark.parametrize(
    "body",
    [
        b"9" * MAX_DIGITS,
        # The largest exponent that is not looked at.
        b"[%be99]" % (b"9" * MAX_DIGITS),
        b"[1e308, 1e-999]",
        b'["NaN", "1e400", "' + b"9" * 999 + b'"]',
    ],
)
def test_what_is_within_the_bounds_is_read(body):
    assert read_json(body)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, "a"], "prompt"),
        (["a", 1], "prompt"),
        ([[1], "a"], "prompt"),
        ([1] * (2**20 + 1), "at most 1048576 items"),
    ],
)
def test_a_prompt_of_mixed_or_too_many_parts_is_named(prompt, message):
    with pytest.raises(ApiError, match=message) as caught:
        read_model(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("escape", [b"\\ud83d", b"\\ud83dx", b"\\udc00"])
def test_half_of_a_character_is_named(escape):
    """Python's json.dumps writes it for a text that was cut within an emoji."""
    with pytest.raises(ApiError, match="half of a surrogate pair"):
        read_model(CompletionRequest, b'{"prompt": "' + escape + b'"}')


def test_a_byte_order_mark_before_a_body_is_skipped(serve):
    headers = {"Content-Type": "application/json"}
    body = '\ufeff{"prompt": "a"}'.encode()
    assert serve().post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 400),
        ("text/json", 400),
    ],
)
def test_a_body_is_json_by_its_header(serve, kind, status):
    body, headers = b'{"prompt": "a"}', {"Content-Type": kind}
    assert serve().post("/v1/completions", content=body, headers=headers).status_code == status


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200), ("br", 415)])
def test_a_compressed_body_is_refused_by_its_header(serve, encoding, status):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    body = b'{"prompt": "a"}'
    answer = serve().post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status
    assert (status == 200) == ("choices" in answer.json())


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [], [[]]])
def test_every_form_of_a_prompt_is_read(prompt):
    found = read_model(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert found.prompt == prompt

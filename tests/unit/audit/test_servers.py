"""Completions as servers send them."""

from __future__ import annotations

import pytest

from sametoken.audit.servers import Server, parse_completion
from sametoken.errors import RequestError

# The form of vLLM's /v1/completions.
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": " a b",
            "logprobs": {
                "text_offset": [0, 2],
                "token_logprobs": [-0.5, -0.25],
                "tokens": [" a", " b"],
                "top_logprobs": [{" a": -0.5, " c": -1.5}, {" d": -2.0, " b": -0.25}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
}


def test_a_completion_without_token_ids():
    answer = parse_completion(COMPLETION)
    assert answer.tokens == (" a", " b")
    assert answer.top[1] == ((" b", -0.25), (" d", -2.0))


def test_token_ids_are_taken_where_they_are():
    choice = COMPLETION["choices"][0] | {"token_ids": [5, 6]}
    assert parse_completion(COMPLETION | {"choices": [choice]}).tokens == (5, 6)


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"text": "x", "logprobs": None}]}, None]
)
def test_other_forms_are_refused(body):
    with pytest.raises(RequestError, match="logprobs"):
        parse_completion(body)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_root_of_a_url(url):
    assert Server(url).root == "http://h:1"

from __future__ import annotations

import pytest

from sametoken.errors import NumericalError, RequestError, StructuredOutputError, UnsupportedError
from sametoken.serving.http.errors import ApiError, as_api_error

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", JSON),
        (b"", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b'"text"', JSON),
        (b"\xff\xfe", JSON),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}),
        (b'{"prompt": "x"}', {}),
        (b'{"prompt": "x", "temperature": NaN}', JSON),
        (b'{"prompt": "x", "temperature": Infinity}', JSON),
        (b'{"prompt": "x", "seed": 1e400}', JSON),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", JSON),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", JSON),
    ],
)
def test_every_bad_body_is_a_400_in_openai_s_shape(serve, content, headers):
    answer = serve().post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_unknown_paths_and_methods(serve):
    client = serve()
    for answer, status in ((client.get("/nowhere"), 404), (client.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert client.get("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("a", "b"), 400, "invalid_request_error"),
        (UnsupportedError("a", "b"), 400, "invalid_request_error"),
        (StructuredOutputError("a", "b"), 400, "invalid_request_error"),
        (NumericalError("a", "b"), 500, "server_error"),
        (ApiError(418, "tea"), 418, "invalid_request_error"),
    ],
)
def test_statuses(error, status, kind):
    found = as_api_error(error)
    assert (found.status, found.body["error"]["type"]) == (status, kind)
    assert found.body["error"]["message"] == str(error)


def test_waiting_is_told_in_whole_seconds():
    assert ApiError(429, "later", retry_after_s=0.2).headers == {"Retry-After": "1"}
    assert ApiError(429, "later", retry_after_s=2.1).headers == {"Retry-After": "3"}


def test_a_message_can_always_be_sent():
    assert ApiError(400, "half \ud800").response().body

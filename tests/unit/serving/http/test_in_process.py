from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from helpers.fake_engine import FakeEngine
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.in_process import AppRequest, messages_of, whole_answer

JSON = ((b"content-type", b"application/json"),)


def post(path: str, **body) -> AppRequest:
    return AppRequest("POST", path, headers=JSON, body=json.dumps(body).encode())


async def test_an_answer_is_that_of_a_client_on_a_socket(serve):
    app = create_app(FakeEngine("hello"), ServerConfig())
    status, body = await whole_answer(app, post("/v1/completions", prompt="a", max_tokens=9))
    expected = serve().post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
    assert (status, json.loads(body)["choices"]) == (200, expected.json()["choices"])


def test_path_query_headers_and_root_reach_the_application():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, body=(await receive())["body"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    request = AppRequest("PUT", "/a", b"x=1", ((b"k", b"v"),), b"body", ("10.0.0.1", 9), "/under")
    assert asyncio.run(whole_answer(app, request)) == (204, b"")
    names = ("method", "path", "query_string", "headers", "client", "root_path", "body")
    expected = ["PUT", "/a", b"x=1", [(b"k", b"v")], ("10.0.0.1", 9), "/under", b"body"]
    assert [seen[name] for name in names] == expected


async def test_leaving_early_ends_the_request_in_the_engine():
    engine = FakeEngine("x", endless=True)
    app = create_app(engine, ServerConfig())
    request = post("/v1/completions", prompt="a", max_tokens=400, stream=True)
    async with aclosing(messages_of(app, request)) as messages:
        async for message in messages:
            if message["type"] == "http.response.body":
                break
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("num_messages", [1, 100])
async def test_a_slow_reader_holds_the_application_back_and_misses_nothing(num_messages):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(num_messages):
            await send({"type": "http.response.body", "body": b"%d " % i, "more_body": True})
            sent.append(i)

    body = b""
    async for message in messages_of(app, AppRequest("GET", "/")):
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(sent) - len(body.split()) <= 20
        body += message.get("body", b"")
    assert body.split() == [b"%d" % i for i in range(num_messages)]


async def test_a_failure_of_the_application_is_its_answer_and_not_ours(caplog):
    class Broken(FakeEngine):
        def begin(self, *arguments):
            raise ZeroDivisionError

    app = create_app(Broken(), ServerConfig())
    status, body = await whole_answer(app, post("/v1/completions", prompt="a"))
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
    assert "failed unexpectedly" in caplog.text

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from helpers.fake_engine import FakeEngine
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.generation import EventStream

BODY = b'{"prompt": "x", "max_tokens": 400, "stream": true}'


class Event(BaseModel):
    text: str
    unset: int = 0


def test_events_errors_and_the_end():
    class Closable:
        closed = False

        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            self.closed = True

    async def events():
        yield Event(text="é\n")
        raise ZeroDivisionError

    async def stay():
        await asyncio.sleep(60)

    sent, source = [], Closable()

    async def send(message):
        sent.append(message)

    asyncio.run(EventStream(source, events())({"type": "http"}, stay, send))
    start, first, error, end = sent
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in dict(start["headers"])
    assert first["body"] == 'data: {"text":"é\\n"}\n\n'.encode()
    assert b"internal_error" in error["body"]
    assert (end["body"], end["more_body"]) == (b"data: [DONE]\n\n", False)
    assert source.closed


async def call(engine: FakeEngine, path: str, body: bytes, leave_after: int) -> list[dict]:
    """Call the application as a client that goes after so many pieces of the answer."""
    app = create_app(engine, ServerConfig())
    sent: list[dict] = []
    gone = asyncio.Event()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        for message in requests:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) > leave_after:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    if not leave_after:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    await asyncio.wait_for(app(scope, receive, send), 10)
    return sent


def test_a_client_that_goes_in_mid_stream_aborts_its_request():
    async def main():
        engine = FakeEngine("x", endless=True)
        sent = await call(engine, "/v1/completions", BODY, leave_after=3)
        assert len(engine.aborted) == 1
        assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)

    asyncio.run(main())


def test_a_client_that_does_not_wait_for_its_answer_aborts_its_request():
    async def main():
        engine = FakeEngine("x", window=1, endless=True)
        for path, body in (
            ("/v1/completions", BODY.replace(b"true", b"false")),
            (
                "/v1/chat/completions",
                b'{"messages": [{"role": "user", "content": "x"}], "ignore_eos": true}',
            ),
        ):
            engine.aborted.clear()
            await call(engine, path, body, leave_after=0)
            assert len(engine.aborted) == 1

    asyncio.run(main())

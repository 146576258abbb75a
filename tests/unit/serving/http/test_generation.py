"""Generation: how requests end, and what a stream sends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from helpers.fake_engine import FakeEngine
from sametoken.errors import EngineDeadError, NumericalError, OverloadedError
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import ApiError
from sametoken.serving.http.generation import (
    EventStream,
    Generation,
    speculation_stats,
    usage,
    while_connected,
)
from sametoken.serving.http.served import Served
from sametoken.serving.http.times import RequestTimes
from sametoken.serving.request_stream import RequestStream
from sametoken.types.outputs import RequestMetrics, RequestOutput
from sametoken.types.sampling_params import SamplingParams

PARAMS = SamplingParams(n=2, max_tokens=64)


async def begin(engine: FakeEngine, *texts: str) -> Generation:
    prompts = [engine.tokenize(text) for text in texts]
    times = RequestTimes(CollectorRegistry(), "toy")
    served = Served(engine, ServerConfig(), times, engine.server_defaults())
    return await served.begin(prompts, PARAMS, "r", served.name(None))


async def test_prompts_run_beside_each_other_and_stay_apart():
    engine = FakeEngine(lambda prompt, index: f"{prompt}{index}" * 3)
    seen = []
    async with await begin(engine, "ab", "c") as generation:
        async for progress in generation:
            seen.append(progress.prompt_index)
    texts = [[one.text for one in output.outputs] for output in generation.outputs]
    assert texts == [["ab0" * 3, "ab1" * 3], ["c0" * 3, "c1" * 3]]
    assert seen != sorted(seen), "one after the other"
    counted = usage(generation.outputs)
    assert (counted.prompt_tokens, counted.completion_tokens) == (3, 2 * 10 + 2 * 7)
    assert speculation_stats(generation.outputs, True).num_accepted_tokens > 0


async def test_a_whole_answer_is_read_at_its_end():
    observed = []
    async with await begin(FakeEngine("hello there"), "a", "b") as generation:
        generation._times.observe = lambda before, output, gap_s: observed.append(output)
        outputs = await generation.finish()
    assert observed == outputs
    assert all(output.finished for output in outputs)


async def test_leaving_early_aborts():
    engine = FakeEngine("x", endless=True)
    async with await begin(engine, "a", "b") as generation:
        async for _ in generation:
            break
    assert sorted(engine.aborted) == ["r-0", "r-1"]


async def test_a_refusal_begins_nothing():
    engine = FakeEngine("x", endless=True)
    begin_one, calls = engine.begin, []

    def refuse_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OverloadedError("too many wait")
        return begin_one(*arguments)

    engine.begin = refuse_the_second
    with pytest.raises(OverloadedError):
        await begin(engine, "a", "b")
    await asyncio.sleep(0.01)
    assert engine.aborted == ["r-0"]


async def test_a_failure_ends_all():
    async with await begin(FakeEngine(failed=True), "a", "b") as generation:
        with pytest.raises(NumericalError):
            await generation.finish()


async def test_a_failure_after_an_output_that_was_not_read_ends_all():
    streams = [RequestStream(name, lambda _: None) for name in "ab"]
    generation = Generation(streams, RequestTimes(CollectorRegistry(), "toy"))
    streams[1].put(RequestOutput("b", "x", (), (), False, RequestMetrics(0.0)))
    streams[1].fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(generation.finish(), 10)
    assert [output.request_id for output in generation.outputs] == ["b"]


async def test_an_abort_from_outside_is_an_error():
    async with await begin(FakeEngine("hello"), "a") as generation:
        (output,) = await generation.finish()
        aborted = tuple(replace(one, finish_reason="abort") for one in output.outputs)
        with pytest.raises(ApiError, match="aborted"):
            generation._take(0, replace(output, outputs=aborted))


async def stay():
    """Receives nothing from a client that goes on waiting."""
    await asyncio.sleep(60)


async def test_work_ends_when_the_client_goes():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive():
        await asyncio.sleep(0)
        return next(messages)

    assert await while_connected(receive, work()) is None
    assert cancelled.is_set()

    assert await while_connected(stay, asyncio.sleep(0, "done")) == "done"


async def test_the_work_s_error_is_raised():
    async def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await while_connected(stay, fail())


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


async def test_other_clients_are_served_between_the_events_of_a_stream():
    turns = 0

    async def be_served():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def events():
        for _ in range(100):
            yield Event(text="x")

    async def send(message):
        pass

    other = asyncio.ensure_future(be_served())
    generation = await begin(FakeEngine(), "x")
    await EventStream(generation, events())({"type": "http"}, stay, send)
    other.cancel()
    assert turns >= 100


async def call(engine: FakeEngine, path: str, body: bytes, leave_after: int) -> list[dict]:
    """Call the application as a client that goes after a number of pieces of the answer."""
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


async def test_a_client_that_goes_in_mid_stream_aborts_its_request():
    engine = FakeEngine("x", endless=True)
    sent = await call(engine, "/v1/completions", BODY, leave_after=3)
    assert len(engine.aborted) == 1
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)


async def test_a_client_that_does_not_wait_for_its_answer_aborts_its_request():
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

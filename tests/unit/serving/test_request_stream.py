"""A stream holds the newest output, then the error; a closed one holds nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sametoken.errors import EngineDeadError
from sametoken.serving.request_stream import RequestStream


async def fail(stream: RequestStream) -> None:
    stream.fail(EngineDeadError("the engine is gone"))


GOING, LAST = SimpleNamespace(finished=False), SimpleNamespace(finished=True)


async def test_the_newest_output_comes_and_then_the_end():
    stream = RequestStream("r", pytest.fail)
    stream.put(GOING)
    stream.put(LAST)
    stream.put(GOING)
    assert not stream.is_read
    assert [output async for output in stream] == [LAST]
    assert stream.is_read


async def test_a_stream_that_failed_is_read_once_its_error_is():
    stream = RequestStream("r", pytest.fail)
    stream.put(GOING)
    stream.fail(EngineDeadError("the engine is gone"))
    assert await anext(stream) is GOING
    assert not stream.is_read
    with pytest.raises(EngineDeadError, match="gone"):
        await anext(stream)
    assert stream.is_read
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_output_is_made_when_it_is_read():
    stream, made = RequestStream("r", pytest.fail), []

    def make():
        made.append(1)
        return GOING

    for _ in range(3):
        stream.grow(make)
    assert not made
    assert await anext(stream) is GOING
    assert stream.take() is None
    assert made == [1]
    stream.put(LAST)
    stream.grow(make)
    assert [output async for output in stream] == [LAST]


async def test_a_reader_of_the_end_is_not_woken_before():
    stream, changed = RequestStream("r", pytest.fail), asyncio.Event()
    stream.share(changed, at_end=True)
    stream.grow(lambda: GOING)
    stream.put(GOING)
    assert not changed.is_set()
    stream.put(LAST)
    assert changed.is_set()
    assert stream.take() is LAST


@pytest.mark.parametrize("ends", [RequestStream.aclose, fail])
async def test_a_reader_of_the_end_is_woken_by_any_end(ends):
    stream, changed = RequestStream("r", lambda _: None), asyncio.Event()
    stream.share(changed, at_end=True)
    await ends(stream)
    assert changed.is_set()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_closed_stream_holds_nothing(fails):
    aborted = []
    stream = RequestStream("r", aborted.append)
    stream.put(GOING)
    if fails:
        stream.fail(EngineDeadError("the engine is gone"))
    await stream.aclose()
    await stream.aclose()
    assert aborted == ([] if fails else ["r"])
    assert stream.is_read
    assert [output async for output in stream] == []

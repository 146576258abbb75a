"""A stream holds the newest output, then the error; a closed one holds nothing."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest

from sametoken.errors import EngineDeadError
from sametoken.serving.request_stream import RequestStream


async def fail(stream: RequestStream) -> None:
    stream.fail(EngineDeadError("the engine is gone"))


async def read(stream: RequestStream) -> list:
    return [output async for output in stream]


OTHER, GOING, LAST = (
    SimpleNamespace(name=name, finished=name == "last") for name in ("other", "going", "last")
)


async def test_the_newest_output_comes_and_then_the_end():
    stream = RequestStream("r", pytest.fail)
    stream.put(OTHER)
    stream.put(GOING)
    assert await anext(stream) is GOING
    stream.put(GOING)
    stream.put(LAST)
    stream.put(GOING)
    assert not stream.is_read
    assert await read(stream) == [LAST]
    assert stream.is_read
    assert await read(stream) == []


async def test_a_waiting_reader_is_woken():
    stream = RequestStream("r", pytest.fail)
    reader = asyncio.create_task(read(stream))
    for output in (OTHER, GOING, LAST):
        await asyncio.sleep(0)
        stream.put(output)
        await asyncio.sleep(0)
    assert await reader == [OTHER, GOING, LAST]


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
    assert await read(stream) == [LAST]


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
    assert await read(stream) == []


@pytest.mark.parametrize("way", ["close", "cancel", "drop"])
async def test_whoever_stops_reading_aborts(way):
    aborted = []
    stream = RequestStream("r", aborted.append)
    stream.put(GOING)
    await anext(stream)
    if way == "close":
        await stream.aclose()
        stream.put(OTHER)
        assert await read(stream) == []
    elif way == "cancel":
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait((reader,))
    else:
        del stream
        gc.collect()
        await asyncio.sleep(0)
    assert aborted == ["r"]


async def test_a_finished_stream_aborts_nothing():
    stream = RequestStream("r", pytest.fail)
    stream.put(LAST)
    await stream.aclose()
    del stream
    gc.collect()
    await asyncio.sleep(0)

"""A stream gives the newest output, ends once, and aborts when nobody reads on."""

from __future__ import annotations

import asyncio
import gc

import pytest

from sametoken.errors import EngineDeadError
from sametoken.serving.engine_client import RequestStream
from sametoken.types.outputs import RequestMetrics, RequestOutput


def output(number, *, finished=False):
    return RequestOutput("r", str(number), (), (), finished, RequestMetrics(0.0))


async def read(stream):
    return [one.prompt async for one in stream]


def test_a_slow_reader_sees_the_newest_and_always_the_last():
    async def scenario():
        stream = RequestStream("r", pytest.fail)
        stream.put(output(1))
        stream.put(output(2))
        assert (await anext(stream)).prompt == "2"
        stream.put(output(3))
        stream.put(output(4, finished=True))
        stream.put(output(5))
        assert await read(stream) == ["4"]
        assert await read(stream) == []

    asyncio.run(scenario())


def test_a_waiting_reader_is_woken():
    async def scenario():
        stream = RequestStream("r", pytest.fail)
        reader = asyncio.create_task(read(stream))
        for number in range(3):
            await asyncio.sleep(0)
            stream.put(output(number, finished=number == 2))
            await asyncio.sleep(0)
        assert await reader == ["0", "1", "2"]

    asyncio.run(scenario())


def test_an_error_comes_after_what_was_not_seen_yet_and_only_once():
    async def scenario():
        stream = RequestStream("r", pytest.fail)
        stream.put(output(1))
        stream.fail(EngineDeadError("gone"))
        assert (await anext(stream)).prompt == "1"
        with pytest.raises(EngineDeadError):
            await anext(stream)
        assert await read(stream) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["close", "cancel", "drop"])
def test_whoever_stops_reading_aborts(way):
    async def scenario():
        aborted = []
        stream = RequestStream("r", aborted.append)
        stream.put(output(1))
        await anext(stream)
        if way == "close":
            await stream.aclose()
            stream.put(output(2))
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

    asyncio.run(scenario())


def test_a_finished_stream_aborts_nothing():
    async def scenario():
        stream = RequestStream("r", pytest.fail)
        stream.put(output(1, finished=True))
        await stream.aclose()
        del stream
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(scenario())

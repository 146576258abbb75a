"""A stream holds the newest output, then the error; a closed one holds nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sametoken.errors import EngineDeadError
from sametoken.serving.request_stream import RequestStream

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

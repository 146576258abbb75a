"""Lines of a batch answered by the application, many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp

from sametoken.engine.serving_limits import ServingLimits
from sametoken.errors import EngineDeadError
from sametoken.server.batch.lines import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    InputLine,
    to_line,
)
from sametoken.server.config import ServerConfig
from sametoken.server.errors import invalid
from sametoken.server.in_process import AppRequest, whole_answer

#: A batch is bounded by how many of its lines run at once, not by the queue.
BATCH_LIMITS = ServingLimits(max_waiting=2**31, max_waiting_tokens=2**62)
#: Engines that a line may lose before the whole run is given up.
_MAX_LOST = 5
_RETRY_S = 1.0
_BUSY = frozenset({429, 503})
_SEED_BITS = 63

Answer = tuple[str, bytes]


def batch_server_config(served_model_name: tuple[str, ...]) -> ServerConfig:
    """Options of an application that only a batch speaks to."""
    return ServerConfig(
        served_model_name=served_model_name,
        max_completions=2**16,
        max_request_bytes=2**40,
        max_bodies_bytes=2**60,
    )


async def answers_of(
    app: ASGIApp, lines: Sequence[InputLine], concurrency: int
) -> AsyncGenerator[list[Answer], None]:
    """Keys and results as they come, those that are ready at the same time together.

    Args:
        app: the application.
        lines: whose requests are sound.
        concurrency: lines that run at once.

    Raises:
        EngineDeadError: the engine is gone for good.
    """
    running: set[asyncio.Task[Answer]] = set()
    waiting = iter(lines)
    try:
        while True:
            for line in waiting:
                running.add(asyncio.ensure_future(_answer(app, line)))
                if len(running) >= concurrency:
                    break
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            yield [task.result() for task in done]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(app: ASGIApp, line: InputLine) -> Answer:
    request = line.parse()
    assert isinstance(request, BatchRequest)
    status, body = await _respond(app, request, line.key)
    request_id = body.get("id") or f"req_{line.key}"
    response = BatchResponse(status_code=status, request_id=request_id, body=body)
    result = BatchResult(id=line.result_id, custom_id=request.custom_id, response=response)
    return line.key, to_line(result)


async def _respond(app: ASGIApp, request: BatchRequest, key: str) -> tuple[int, dict[str, Any]]:
    if request.body.get("stream"):
        error = invalid("a batch has no streams. Leave stream out", "stream", "unsupported")
        return error.status, error.body
    body = json.dumps(_with_seed(request.body, key)).encode()
    headers = ((b"content-type", b"application/json"),)
    sent = AppRequest("POST", request.url, headers=headers, body=body)
    num_lost = 0
    while num_lost < _MAX_LOST:
        status, text = await whole_answer(app, sent)
        answer: dict[str, Any] = json.loads(text)
        if status not in _BUSY:
            return status, answer
        num_lost += answer["error"]["code"] == "engine_dead"
        await asyncio.sleep(_RETRY_S)
    raise EngineDeadError(
        f"the engine was lost {_MAX_LOST} times under one request ({answer['error']['message']})",
        "the same command goes on with what is left",
    )


def _with_seed(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The body with a seed: an answer must not depend on when and where its line was run."""
    if body.get("seed") is not None:
        return dict(body)
    return {**body, "seed": int(key, 16) % 2**_SEED_BITS}

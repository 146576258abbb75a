"""Server-sent events, and the end of the work when nobody reads them any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sametoken.core.outputs import RequestOutput
from sametoken.server.errors import as_api_error
from sametoken.server.generation import CLIENT_GONE, Generation, while_connected
from sametoken.server.responses import json_response

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object as one event, then ``[DONE]``; an error on the way is an event too.

    Args:
        generation: where the events come from; closed when all are sent, or as soon as the
            client has gone.
        events: the objects to send.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncGenerator[BaseModel, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is not known yet.
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        async with self._generation:
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await _send_event(send, event.model_dump_json(exclude_unset=True).encode())
            except Exception as error:
                body = json.dumps(as_api_error(error).body)
                await _send_event(send, body.encode())
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


class Answer(Protocol):
    """A generation's outputs in the form of one endpoint."""

    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """The answer without a stream."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The answer in pieces."""
        ...


async def respond(
    http: Request, generation: Generation, answer: Answer, *, stream: bool
) -> Response:
    """Stream the answer, or send it whole once the generation has finished.

    Raises:
        ApiError, SametokenError: the generation failed before anything was sent.
    """
    if stream:
        return EventStream(generation, answer.stream(generation))
    async with generation:
        outputs = await while_connected(http.receive, generation.finish())
    if outputs is None:
        return Response(status_code=CLIENT_GONE)
    return await asyncio.to_thread(lambda: json_response(answer.whole(outputs)))


async def _send_event(send: Send, payload: bytes) -> None:
    body = b"data: " + payload + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})

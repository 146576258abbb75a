"""Server-sent events, and the end of the work when nobody reads them any more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sametoken.server.errors import as_api_error
from sametoken.server.generation import Generation, while_connected

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


async def _send_event(send: Send, payload: bytes) -> None:
    body = b"data: " + payload + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})

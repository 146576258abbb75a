"""Requests to the application without a socket: from other machines, or from a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

#: Messages that an application may send ahead of its reader.
_MAX_UNREAD = 16
_logger = logging.getLogger("sametoken.server")


@dataclass(frozen=True, slots=True)
class AppRequest:
    """One HTTP request, whole.

    Attributes:
        method, path: of the request line.
        query: after the question mark, as it came.
        headers: names in lower case.
        body: all of it.
        client: address and port of the client, if they are known.
        root_path: under which a proxy serves the application.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    root_path: str = ""

    @property
    def scope(self) -> Scope:
        """The request in ASGI's form."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "server": None,
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "root_path": self.root_path,
            "state": {},
        }


async def messages_of(app: ASGIApp, request: AppRequest) -> AsyncGenerator[Message, None]:
    """What an application answers, message by message (ASGI).

    Closing the generator early ends the application's work, as a client that goes does.
    """
    unread: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_UNREAD)
    to_send: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        # A client that is there has nothing more to say; one that goes cancels the work.
        return to_send.pop() if to_send else await asyncio.Future()

    async def answer() -> None:
        try:
            await app(request.scope, receive, unread.put)
        except Exception:
            # Starlette answers with status 500 before it lets an error through.
            _logger.exception("a request failed unexpectedly")
        finally:
            await unread.put(None)

    work = asyncio.ensure_future(answer())
    try:
        while (message := await unread.get()) is not None:
            yield message
    finally:
        work.cancel()
        while not unread.empty():
            unread.get_nowait()
        await asyncio.gather(work, return_exceptions=True)


async def whole_answer(app: ASGIApp, request: AppRequest) -> tuple[int, bytes]:
    """Status and body of an answer."""
    start: dict[str, Any] = {}
    body = bytearray()
    async for message in messages_of(app, request):
        start = start or dict(message)
        body += message.get("body", b"")
    return start["status"], bytes(body)

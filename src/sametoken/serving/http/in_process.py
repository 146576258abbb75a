"""Requests to the ASGI application without a socket: from a Ray gateway or a batch file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

#: Messages that the application may be ahead of its reader.
_MAX_UNREAD = 16
_logger = logging.getLogger("sametoken.server")


@dataclass(frozen=True, slots=True)
class AppRequest:
    """One complete HTTP request.

    Attributes:
        method, path: from the request line.
        query: the raw text after the question mark.
        headers: names in lower case.
        body: the complete body.
        client: address and port of the client, if known.
        root_path: the path under which a proxy serves the application.
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
        """The request as an ASGI scope."""
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
    """The messages of an application's response (ASGI).

    Closing the generator early cancels the application's work, like a disconnected client.
    """
    unread: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_UNREAD)
    to_send: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        # No message follows the body: a disconnect cancels the work instead.
        return to_send.pop() if to_send else await asyncio.Future()

    async def answer() -> None:
        try:
            await app(request.scope, receive, unread.put)
        except Exception:
            # Starlette sends status 500 before it raises an error.
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
    """Status and body of a response."""
    start: dict[str, Any] = {}
    body = bytearray()
    async for message in messages_of(app, request):
        start = start or dict(message)
        body += message.get("body", b"")
    return start["status"], bytes(body)

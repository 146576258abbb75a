"""A minimal HTTP/1.1 client: one connection, requests as bytes, streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

#: Bytes of one line, or of one head.
_LIMIT = 2**20


class LostError(Exception):
    """The connection ended before the answer did."""


class StaleError(LostError):
    """A connection that was used before ended before the answer began."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: dict[str, str]

    @property
    def retry_after(self) -> str | None:
        """The ``Retry-After`` header."""
        return self.headers.get("retry-after")


def request(method: str, path: str, content: bytes = b"") -> bytes:
    """Build a complete request."""
    return _head(method, path, len(content)) + content


def _head(method: str, path: str, length: int) -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


class Connection:
    """A connection to the server, for one task at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._num_answers = 0

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Connection:
        """Connect."""
        try:
            return cls(*await asyncio.open_connection(*address, limit=_LIMIT))
        except OSError as error:
            raise LostError(f"no connection: {error}") from error

    def write(self, data: bytes) -> None:
        """Send bytes; errors appear when the answer is read."""
        self._writer.write(data)

    async def flush(self) -> None:
        """Wait until there is room for more to send."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Abort the connection."""
        self._writer.transport.abort()

    async def ended(self) -> bytes:
        """Read until the server closes the connection."""
        try:
            return await self._reader.read()
        except OSError:
            return b""

    async def head(self) -> Head:
        """Read the head of the next answer.

        Raises:
            LostError: there is none.
        """
        try:
            text = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError) as error:
            partial = getattr(error, "partial", b"")
            kind = StaleError if self._num_answers and not partial else LostError
            raise kind(f"no answer: {error!r}") from error
        self._num_answers += 1
        first, *lines = text.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Head(int(first.split(" ", 2)[1]), headers)

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """Stream the body.

        Raises:
            LostError: the body is incomplete.
        """
        try:
            if "content-length" in head.headers:
                yield await self._reader.readexactly(int(head.headers["content-length"]))
                return
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LostError(f"the answer was cut off: {error!r}") from error

    async def body(self, head: Head) -> bytes:
        """Read the whole body."""
        return b"".join([piece async for piece in self.pieces(head)])

    async def events(self, head: Head) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the events of a stream, and None for ``[DONE]``."""
        rest = b""
        async for piece in self.pieces(head):
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                text = event.removeprefix(b"data: ")
                yield None if text == b"[DONE]" else json.loads(text)


async def fetch(address: tuple[str, int], method: str, path: str, content: bytes = b"") -> Any:
    """Send one request on a new connection and return head and body of the answer.

    Raises:
        LostError: there is no answer.
    """
    connection = await Connection.open(address)
    try:
        connection.write(request(method, path, content))
        head = await connection.head()
        return head, await connection.body(head)
    finally:
        connection.close()

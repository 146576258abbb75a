"""Limits of HTTP connections: their number, and timeouts against slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import invalid
from sametoken.serving.http.generation import disconnect
from sametoken.serving.watchdog import Watchdog

#: Bytes read from a connection at a time, so that none delays the others for long.
_READ_BYTES = 32 * 1024
#: Connections accepted at a time.
_AT_ONCE = 32
#: Seconds without accepting when the system has no descriptor or memory for a connection.
_PAUSE_S = 0.05
#: Seconds that a client has to read a response that precedes the end of its request.
_LINGER_S = 2.0
#: Bytes of later requests that are kept during an answer.
_MAX_AHEAD = 64 * 1024
#: Pieces that any body may arrive in, and mean bytes of each further piece.
_FREE_PIECES, _MEAN_PIECE = 1024, 16
#: The longest target of a request, which is logged, and the largest headers with the target.
_MAX_TARGET, _MAX_HEADERS = 4096, 16 * 1024
_CLOSE = (b"connection", b"close")


class LogRateLimit(logging.Filter):
    """Passes one record of each kind per second, so that no attack fills a disk."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._last: dict[tuple[object, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``. A kind is an unformatted message."""
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.msg, record.exc_info and record.exc_info[0])
        now = self._now()
        if now - self._last.get(kind, -1.0) < 1.0:
            return False
        self._last[kind] = now
        return True


_logger = logging.getLogger("sametoken.serving.http.connections")
_logger.addFilter(LogRateLimit())


class Connections:
    """All connections of a server, and the waiting ones, the longest wait first.

    A connection waits while it has no complete request to work on, or while its client does not
    read the response. At the limit, the longest waiting connection is closed for a new one.

    Args:
        most: limit of connections, at least 1.
    """

    def __init__(self, most: int) -> None:
        self.buffer = bytearray(_READ_BYTES)
        self._most = most
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        self._listeners: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._all)

    def accept_from(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        context: ssl.SSLContext | None,
    ) -> None:
        """Start to accept the connections of a socket.

        Args:
            listener: a socket after ``listen``; not closed here.
            make: makes a connection's protocol.
            context: for TLS.
        """
        loop = asyncio.get_running_loop()

        def resume() -> None:
            if listener in self._listeners:
                loop.add_reader(listener, accept)

        def accept() -> None:
            try:
                for _ in range(_AT_ONCE):
                    client, _ = listener.accept()
                    self._take(client, make, context)
            except (BlockingIOError, InterruptedError, ConnectionError):
                pass
            except OSError as error:
                _logger.warning("a connection cannot be accepted: %s", error)
                for waiting in list(itertools.islice(self._waiting, _AT_ONCE)):
                    waiting.drop()
                # Their descriptors are closed in the event loop's next iterations.
                loop.remove_reader(listener)
                loop.call_later(_PAUSE_S, resume)

        self._listeners.append(listener)
        resume()

    def stop(self) -> None:
        """Accept no more connections, and drop those in a TLS handshake."""
        loop = asyncio.get_running_loop()
        while self._listeners:
            loop.remove_reader(self._listeners.pop())
        for connection in [one for one in self._all if not one.is_open]:
            connection.drop()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)

    def note(self, connection: Connection, *, waits: bool) -> None:
        """Record whether a connection waits."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._all:
            self._waiting.setdefault(connection)

    def _take(
        self, client: socket.socket, make: Callable[[], Connection], context: ssl.SSLContext | None
    ) -> None:
        if len(self._all) >= self._most:
            longest = next(iter(self._waiting), None)
            if longest is None:
                _logger.warning("a connection was refused: all %d are busy", len(self._all))
                client.close()
                return
            _logger.warning("a waiting connection was closed: there are %d", len(self._all))
            longest.drop()
        connection = make()
        self._all.add(connection)
        self._waiting[connection] = None
        connection.begin(client, context)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP connection with additional timeouts.

    Args:
        config, server_state, app_state: uvicorn's.
        connections: all connections, this one included.
        limits: has the timeouts.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        connections: Connections,
        limits: ServerConfig,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = _Parser(h11.SERVER)
        self._inner_app, self.app = self.app, self._answer
        self._connections = connections
        self._limits = limits
        self._header_timer = Watchdog(limits.header_timeout, self.drop)
        self._reader_timer = Watchdog(limits.write_timeout, self._check_reader)
        # Bytes that the client had not read when its timer was started.
        self._unread = 0
        self._ignores_input = False

    @property
    def is_open(self) -> bool:
        """Whether the connection is established, its TLS handshake included."""
        return self.transport is not None

    def begin(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        """Open the connection over a socket."""
        self._opening = self.loop.create_task(self._open(client, context))
        self._opening.add_done_callback(functools.partial(self._opened, client))

    def _opened(self, client: socket.socket, _: asyncio.Task[None]) -> None:
        if not self.is_open:
            self._connections.remove(self)
            client.close()

    async def _open(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        limit_s = self._limits.header_timeout if context else None
        # An error means that the client's handshake failed or took too long.
        with contextlib.suppress(OSError):
            await self.loop.connect_accepted_socket(
                lambda: self, client, ssl=context, ssl_handshake_timeout=limit_s
            )

    def drop(self) -> None:
        """Abort the connection; unsent data is lost."""
        self._connections.remove(self)
        if self.is_open:
            self.transport.abort()
        else:
            self._opening.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._update_state()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._connections.remove(self)
        self._header_timer.disarm()
        self._reader_timer.disarm()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def get_buffer(self, sizehint: int) -> bytearray:
        """See ``asyncio.BufferedProtocol``: ``buffer_updated`` copies the data at once."""
        return self._connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See ``asyncio.BufferedProtocol``."""
        self.data_received(bytes(memoryview(self._connections.buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._ignores_input:
            return
        is_ahead = self.conn.their_state is h11.DONE
        super().data_received(data)
        if is_ahead:
            # uvicorn reads no more, and would not see that the client leaves.
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > _MAX_AHEAD:
                # What is not kept cannot be answered: the client is to send it again.
                self._ignores_input, self.cycle.keep_alive = True, False
        self._update_state()

    def on_response_complete(self) -> None:
        """See ``H11Protocol``."""
        # An idle connection keeps no body.
        self.cycle.body = bytearray()
        super().on_response_complete()
        self._update_state()

    def shutdown(self) -> None:
        """See ``H11Protocol``; a request whose body has not come in whole is not waited for."""
        # Its answer would be a refusal: the engine serves nothing new.
        if self.conn.states == {h11.CLIENT: h11.SEND_BODY, h11.SERVER: h11.SEND_RESPONSE}:
            self.transport.close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """See ``H11Protocol``."""
        super().timeout_keep_alive_handler()
        self._update_state()

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``: the client reads more slowly than the server writes."""
        super().pause_writing()
        self._update_state()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        super().resume_writing()
        self._update_state()

    def send_400_response(self, msg: str) -> None:
        """See ``H11Protocol``: the input is not HTTP, or beyond a limit."""
        response = invalid(
            "the request is not HTTP/1.1, or exceeds a limit: headers of "
            f"{_MAX_HEADERS >> 10} KiB, a target of {_MAX_TARGET} bytes that is a path, one "
            f"length, bodies in pieces of {_MEAN_PIECE} bytes. Send a simpler one"
        ).response()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [*response.raw_headers, _CLOSE]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._ignores_input = True
        if self.cycle is not None:
            # Stops the application from waiting for the body and sending a second response.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _update_state(self) -> None:
        """Start or stop the timers by the connection's state, and record whether it waits."""
        closing = self.transport.is_closing()
        in_header = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        self._header_timer.arm(in_header and not closing)
        unread = self.flow.write_paused or closing
        if unread and not self._reader_timer.is_armed:
            self._unread = self.transport.get_write_buffer_size()
        self._reader_timer.arm(unread)
        receiving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        answering = self.cycle is not None and not self.cycle.response_complete
        works = answering and not (receiving or unread or self._ignores_input)
        self._connections.note(self, waits=not works)

    def _check_reader(self) -> None:
        """Drop a connection whose client has read nothing since its timer was started."""
        if self.transport.get_write_buffer_size() >= self._unread:
            self.drop()
        else:
            self._update_state()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application (ASGI).

        A response before the end of the request, or after too much beyond it, ends the connection,
        and the rest is ignored. The client has time to read the response: closing a socket with
        unread input resets the connection, and the response may be lost.
        """

        async def send_on(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and (self._ignores_input or self.conn.their_state is h11.SEND_BODY):
                self._ignores_input = True
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            elif self._ignores_input and not is_start and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LINGER_S):
                        await disconnect(receive)
                message = {"type": "http.response.body"}
            await send(message)

        await self._inner_app(scope, receive, send_on)


class _Parser(h11.Connection):
    """An h11 parser that refuses requests whose cost is out of proportion to their size."""

    _num_pieces = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See ``h11.Connection``."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            if len(event.target) > _MAX_TARGET or event.target[:1] not in (b"/", b"*"):
                raise h11.RemoteProtocolError("the target is too long, or no path")
            # h11 counts those alone that come in several pieces.
            size = sum(len(name) + len(value) for name, value in event.headers)
            if size + len(event.target) > _MAX_HEADERS:
                raise h11.RemoteProtocolError("the headers are too large")
            # Request smuggling: a proxy may use the other length than this server.
            if {b"transfer-encoding", b"content-length"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("the body has two lengths")
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > _FREE_PIECES + self._num_bytes // _MEAN_PIECE:
                raise h11.RemoteProtocolError("the body comes in too many pieces")
        return event

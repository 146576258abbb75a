"""Runs the HTTP server until a signal, with graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sametoken.config import EngineConfig
from sametoken.io.garbage import exempt_objects
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.connections import Connection, Connections, LogRateLimit
from sametoken.serving.http.listen import (
    address_of,
    connections_that_fit,
    listen,
    raise_descriptor_limit,
)
from sametoken.serving.http.log import PollFilter, log_load
from sametoken.serving.limits import ServingLimits

#: Seconds to send the rest of the responses, a few packets, once the engine is done.
_LAST_SECONDS = 5
#: Seconds that an idle connection stays open: longer than the 5 to 60 of most clients and proxies,
#: since a request on a connection that the server closes is lost.
_KEEP_ALIVE_S = 75
_logger = logging.getLogger("sametoken.server")
_LOG_LIMIT = LogRateLimit()


def run(
    engine_config: EngineConfig,
    limits: ServingLimits,
    config: ServerConfig,
    listener: socket.socket,
) -> bool:
    """Load the model, then serve it at ``listener`` until a signal.

    After SIGTERM requests may finish within ``drain_timeout`` seconds, while new ones and
    ``/ready`` get status 503. SIGINT, or a second SIGTERM, ends the server at once, and so does a
    SIGTERM while the model loads.

    Returns:
        Whether SIGINT ended it.

    Raises:
        SametokenError: the engine cannot start.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("sametoken").setLevel(config.log_level.upper())
    raise_descriptor_limit()
    with _ended_by_sigterm():
        return asyncio.run(_serve(engine_config, limits, config, listener))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which process 1 of a container ignores, ends this one unless a server drains."""
    before = signal.signal(signal.SIGTERM, lambda *received: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on SIGTERM and limits its connections.

    Args:
        app: the application.
        engine: drained on SIGTERM.
        config: options of the server.

    Attributes:
        interrupted: whether there was a SIGINT.
    """

    def __init__(self, app: FastAPI, engine: AsyncLLM, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                root_path=config.root_path,
                log_level=config.log_level,
                access_log=not config.disable_uvicorn_access_log,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_graceful_shutdown=_LAST_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_S,
                http="h11",
                ws="none",
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_LOG_LIMIT)
        logging.getLogger("uvicorn.access").addFilter(PollFilter(config.root_path))
        self.interrupted = False
        self._engine = engine
        self._limits = config
        self._connections = Connections(connections_that_fit(config.max_connections))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        self._loop = asyncio.get_running_loop()
        listeners = sockets or []
        # A client may wait for "Application startup complete", which is logged below.
        for listener in listeners:
            listen(listener)
        # uvicorn's own listeners do not limit connections.
        await super().startup([])
        for listener in listeners:
            self._connections.accept_from(listener, self._connection, self.config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        self._connections.stop()
        # Otherwise clients would be cut off in mid-response, after ``_LAST_SECONDS``.
        self._engine.end_requests()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves the application running, and logs a traceback of its end.
            await self.lifespan.shutdown()

    def _connection(self) -> Connection:
        state = self.lifespan.state
        return Connection(self.config, self.server_state, state, self._connections, self._limits)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``uvicorn.Server``: handle a signal."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if sig == signal.SIGTERM and self._loop is not None and self._draining is None:
            # The handler may interrupt any code, so the drain begins in the event loop.
            self._loop.call_soon_threadsafe(self.begin_drain)
            return
        self.force_exit = self.should_exit
        self.should_exit = True

    def begin_drain(self) -> None:
        """Refuse new requests, and stop once the others have ended."""
        if self._draining is None:
            _logger.info("draining: requests may still take %g s", self._limits.drain_timeout)
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if not await self._engine.drain(self._limits.drain_timeout):
            _logger.warning(
                "requests did not end within %g s and are aborted", self._limits.drain_timeout
            )
        self.should_exit = True


async def _serve(
    engine_config: EngineConfig,
    limits: ServingLimits,
    config: ServerConfig,
    listener: socket.socket,
) -> bool:
    engine = await AsyncLLM.start(engine_config, limits)
    try:
        server = DrainingServer(create_app(engine, config), engine, config)
        where = address_of(listener, config)
        _logger.info("serving %s at %s", engine.resolved.model, where)
        exempt_objects()
        # In the background: no request waits for it.
        background = [asyncio.create_task(engine.start_grammar_trials())]
        if not config.disable_log_stats:
            background.append(asyncio.create_task(log_load(engine.stats)))
        # A SIGINT by now ends all here; in ``serve`` uvicorn would log a traceback of its start.
        await asyncio.sleep(0)
        await server.serve(sockets=[listener])
        for task in background:
            task.cancel()
        return server.interrupted
    finally:
        await engine.shutdown()

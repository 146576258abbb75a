"""The serving process's handle of the engine process: start, send, receive, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError, SametokenError
from sametoken.io.child_process import LENGTH, Failure, decode, encode, spawn, status_text
from sametoken.serving.messages import Announcement, Build, Launch, Ready

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore

#: Seconds that a process has to end once its socket is closed.
_GRACE_S = 5.0
_MODULE = "sametoken.serving.engine_main"
_logger = logging.getLogger("sametoken")


def build_engine(config: EngineConfig, announce: Callable[[str], None]) -> EngineCore:
    """``engine.build.build_engine``, imported where it is needed: it takes seconds."""
    from sametoken.engine.build import build_engine

    return build_engine(config, announce)


class EngineProcess:
    """One engine process, ready to serve.

    The processes share a socket pair. The kernel closes the engine's end when its process dies,
    whatever the cause, and ``receive`` then returns None at once.

    Attributes:
        ready: the engine's message after it was built.
    """

    ready: Ready

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._failure: SametokenError | None = None

    @classmethod
    async def start(cls, config: EngineConfig, build: Build) -> EngineProcess:
        """Start a process and wait until it has built its engine.

        Raises:
            ConfigError, CheckpointError, UnsupportedError, DrafterMismatchError: the engine
                cannot be built.
            EngineDeadError: the process ended for another reason.
        """
        process, sock = spawn(_MODULE)
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException:
            process.kill()
            process.wait()
            raise
        engine = cls(process, reader, writer)
        try:
            engine.send(Launch(config, build))
            await engine._await_ready()
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message; it is lost if the process has died."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Any | None:
        """The next message; None once the process has died or reported its failure."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            message = decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        if isinstance(message, Failure):
            self._failure = message.error
            return None
        return message

    async def stop(self, *, grace_s: float = _GRACE_S) -> SametokenError:
        """Close the socket and wait for the end.

        A process that takes too long is killed, and so is one for which nobody waits any more,
        because this call is cancelled.

        Returns:
            Why the process ended, if it ended unexpectedly.
        """
        # Without what is unsent: a process that reads nothing would never let the socket close.
        self._writer.transport.abort()
        try:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            status = await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        return self._failure or EngineDeadError(
            f"the engine process ended with {status_text(status)}",
            "see its log; requests that it lost can be sent again",
        )

    def kill(self, cause: SametokenError) -> None:
        """Kill the process; ``stop`` returns the cause."""
        self._failure = cause
        self._process.kill()

    async def _await_ready(self) -> None:
        while not isinstance(message := await self.receive(), Ready):
            if message is None:
                raise await self.stop()
            if isinstance(message, Announcement):
                _logger.info(message.text)
        self.ready = message

"""A request's outputs on their way to its reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sametoken.errors import SametokenError
from sametoken.types.outputs import RequestOutput


class RequestStream(AsyncIterator[RequestOutput]):
    """An async iterator over cumulative outputs; the last one is ``finished``.

    It holds only the newest output, so a slow reader costs no memory. Closing it, cancelling
    its reader, or dropping it aborts the request.

    Args:
        request_id: the request.
        abort: called with the id, on the event loop, when an unfinished stream is closed.
    """

    _ended = True

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._at_end = False
        self._newest: Callable[[], RequestOutput] | None = None
        self._error: SametokenError | None = None
        self._ended = False

    def grow(self, newest: Callable[[], RequestOutput]) -> None:
        """Replace the unread output by one that is made once it is read; ignored after the end."""
        if self._ended:
            return
        self._newest = newest
        if not self._at_end:
            self._changed.set()

    def put(self, output: RequestOutput) -> None:
        """Replace the unread output; ignored after the end."""
        self.grow(lambda: output)
        if output.finished:
            self._ended = True
            self._changed.set()

    def fail(self, error: SametokenError) -> None:
        """End with an error, after any unread output."""
        if self._ended:
            return
        self._error = error
        self._ended = True
        self._changed.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while (output := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        return output

    def share(self, changed: asyncio.Event, *, at_end: bool) -> None:
        """Set this event when there is something to take, for a reader of several streams.

        With ``at_end`` only once the stream has ended.
        """
        self._changed, self._at_end = changed, at_end

    @property
    def is_read(self) -> bool:
        """Whether it has ended, and nothing is left to take."""
        return self._ended and self._newest is None and self._error is None

    def take(self) -> RequestOutput | None:
        """The unread output, if there is one.

        Raises:
            SametokenError: the request has failed, and its outputs are read.
        """
        newest, self._newest = self._newest, None
        if newest is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._error is not None:
            # It is next, and nothing else wakes a reader of several streams for it.
            self._changed.set()
        return newest and newest()

    async def aclose(self) -> None:
        """Close the stream; an unfinished request is aborted."""
        self._close()

    def _close(self) -> None:
        self._newest = self._error = None
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)
        self._changed.set()

    def __del__(self) -> None:
        if not self._ended:
            # Garbage collection may run on any thread, and after the loop has closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abort, self.request_id)

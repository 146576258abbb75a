"""One request's outputs on their way to whoever asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sametoken.core.outputs import RequestOutput
from sametoken.errors import SametokenError


class RequestStream(AsyncIterator[RequestOutput]):
    """An async iterator over cumulative outputs; the last one is ``finished``.

    It holds the newest output alone, so a slow reader costs no memory. Closing it, cancelling
    its reader, and dropping it all abort the request.

    Args:
        request_id: whose outputs these are.
        abort: called with the id once nobody will read on; on the event loop.
    """

    _ended = True

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._newest: RequestOutput | None = None
        self._error: SametokenError | None = None
        self._ended = False

    def put(self, output: RequestOutput) -> None:
        """Replace what the reader has not seen yet; nothing comes after the end."""
        if self._ended:
            return
        self._newest = output
        self._ended = output.finished
        self._changed.set()

    def fail(self, error: SametokenError) -> None:
        """End in an error, after an output that was not seen yet."""
        if self._ended:
            return
        self._error = error
        self._ended = True
        self._changed.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._newest is None:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        output, self._newest = self._newest, None
        return output

    async def aclose(self) -> None:
        """Read no further; an unfinished request is aborted."""
        self._close()

    def _close(self) -> None:
        self._newest = self._error = None
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)
        self._changed.set()

    def __del__(self) -> None:
        if not self._ended:
            # Collection may run on any thread, and after the loop has closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abort, self.request_id)

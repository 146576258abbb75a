"""Work on requests before they begin, off the event loop: some have grammars, which are slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sametoken.errors import DrainingError
from sametoken.text.grammar.trials import AT_ONCE, TIME_LIMIT, busy

T = TypeVar("T")


class Preparations:
    """Prepares requests in threads until ``end``; of one event loop."""

    def __init__(self) -> None:
        # A separate pool: slow grammars must not block the tokenizer's threads.
        self._grammar_threads = ThreadPoolExecutor(AT_ONCE, "grammar")
        self._grammar_slots = asyncio.Semaphore(AT_ONCE)
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], T], *, has_new_grammar: bool) -> T:
        """The result of ``work``; it is lost if the caller is cancelled.

        Raises:
            OverloadedError: other grammars are being compiled, and take long.
            DrainingError: ``end`` came first.
        """
        in_thread = self._with_slot(work) if has_new_grammar else asyncio.to_thread(work)
        task = asyncio.ensure_future(in_thread)
        self._running.add(task)
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                raise DrainingError("the server takes no new requests", "send them to another one")
            return task.result()
        finally:
            self._running.discard(task)
            task.cancel()

    async def start(self, work: Callable[[], object]) -> None:
        """Do what the first grammar would wait for."""
        await asyncio.wrap_future(self._grammar_threads.submit(work))

    def end(self) -> None:
        """Refuse all that are being prepared."""
        for task in self._running:
            task.cancel()

    def stop(self) -> None:
        """Refuse all, and start no more threads."""
        self.end()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def _with_slot(self, work: Callable[[], T]) -> T:
        try:
            await asyncio.wait_for(self._grammar_slots.acquire(), TIME_LIMIT)
        except TimeoutError as error:
            raise busy() from error
        done = self._grammar_threads.submit(work)
        # Released when the thread is free: a cancelled call leaves a busy thread.
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: self._release_slot(loop))
        return await asyncio.wrap_future(done)

    def _release_slot(self, loop: asyncio.AbstractEventLoop) -> None:
        # On a closed loop nothing waits for a slot.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._grammar_slots.release)

"""Submitted completions whose grammar is compiled first, beside the engine's steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sametoken.engine.messages import Prepared, Submit
from sametoken.errors import SametokenError, StructuredOutputError

#: As many as the serving process tries at once, so that none pile up here.
_THREADS = 2


class Preparation:
    """Threads that compile, one grammar each at a time.

    Args:
        done: told of every submission that is through, from any thread.
    """

    def __init__(self, done: Callable[[Prepared], None]) -> None:
        self._done = done
        self._waiting: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        # Who wants each completion: an id may come again once its first request was aborted.
        self._wanted: dict[str, Submit] = {}
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"grammar {number}", daemon=True).start()

    def begin(self, submit: Submit) -> None:
        """Prepare completions; all of them share one grammar."""
        self._wanted |= {one.request_id: submit for one in submit.completions}
        self._waiting.put(submit)

    def drop(self, request_id: str) -> bool:
        """Forget a completion that nobody wants any more; whether it was here."""
        return self._wanted.pop(request_id, None) is not None

    def end(self, submit: Submit) -> Submit:
        """What is still wanted of a submission that is through."""
        wanted = tuple(
            one for one in submit.completions if self._wanted.get(one.request_id) is submit
        )
        for completion in wanted:
            del self._wanted[completion.request_id]
        return Submit(wanted)

    def _work(self) -> None:
        while True:
            submit = self._waiting.get()
            self._done(Prepared(submit, _failure(submit)))


def _failure(submit: Submit) -> SametokenError | None:
    grammar = submit.completions[0].grammar
    try:
        if grammar is not None:
            grammar.prepare()
    except SametokenError as error:
        return error
    except Exception as error:
        return StructuredOutputError(
            f"structured_outputs could not be compiled by the engine: {error!r}", "make it smaller"
        )
    return None

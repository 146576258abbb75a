"""Submitted completions whose grammar is compiled first, beside the engine's steps.

Where completions end by their tokens alone, told without any text.

The engine process: builds an engine, then steps it as long as there is something to do.

Run as ``python -m sametoken.serving.engine_main FD``, the number of an inherited socket whose
first message is ``Launch``. Two threads move messages, so that a step waits for neither
pickling nor sockets. It ends when the socket closes: nobody is left to serve.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.engine.summary import summarise
from sametoken.errors import EngineDeadError, SametokenError, StructuredOutputError
from sametoken.io.child_process import (
    Failure,
    Inbox,
    Outbox,
    take_socket,
)
from sametoken.serving.messages import (
    Announcement,
    Launch,
    Prepared,
    Ready,
    Refused,
    Release,
    StepReport,
    Submit,
)
from sametoken.serving.stats import EngineLoad
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)

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


@dataclass(slots=True)
class _Open:
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    num_kept: int


class StopChecker:
    """Sees stop tokens and length limits in the process that steps.

    The serving process, which knows the text, comes to the same end or, at a stop string, to
    an earlier one; the engine need not wait for it to free a slot.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def add(self, request: EngineRequest) -> None:
        """Watch a completion."""
        self._open[request.request_id] = _Open(
            frozenset(request.stop_token_ids),
            request.max_total_tokens,
            len(request.prompt_token_ids),
        )

    def discard(self, request_id: str) -> bool:
        """Stop watching; whether the completion was watched, and so had not ended."""
        return self._open.pop(request_id, None) is not None

    def take(self, update: RequestUpdate) -> int | None:
        """Tokens of prompt and output that a completion keeps if this update ends it.

        None if it goes on, and for one that nobody watches. A failed one is forgotten: the
        scheduler has released it.
        """
        watched = self._open.get(update.request_id)
        if watched is None:
            return None
        if update.failed:
            self.discard(update.request_id)
            return None
        for token_id in update.token_ids:
            watched.num_kept += 1
            at_limit = watched.num_kept >= watched.max_total_tokens
            if at_limit or token_id in watched.stop_token_ids:
                self.discard(update.request_id)
                return watched.num_kept
        return None


class EngineLoop:
    """One engine, stepped on behalf of the serving process."""

    def __init__(self, engine: EngineCore, outbox: Outbox, preparation: Preparation) -> None:
        self._engine = engine
        self._outbox = outbox
        self._preparation = preparation
        self._ends = StopChecker()
        self._num_received = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether ``turn`` would step."""
        return self._engine.has_unfinished

    def turn(self, messages: list[Any]) -> None:
        """Take messages in order, run one step if there is one to run, and report.

        Raises:
            SametokenError: the step failed, or a message says that the engine cannot go on.
        """
        for message in messages:
            self._take(message)
        updates: tuple[RequestUpdate, ...] = ()
        step_seconds = None
        if self._engine.has_unfinished:
            began = time.perf_counter()
            updates = self._engine.step()
            step_seconds = time.perf_counter() - began
        for update in updates:
            num_kept = self._ends.take(update)
            if num_kept is not None:
                self._engine.release(update.request_id, num_kept)
        self._outbox.put(StepReport(updates, self._load(), step_seconds))

    def _take(self, message: Submit | Prepared | Release | Failure) -> None:
        if isinstance(message, Failure):
            raise message.error
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Prepared):
            self._take_prepared(message)
        else:
            self._release(message)

    def _release(self, message: Release) -> None:
        for request_id, num_kept in message.num_kept.items():
            if self._preparation.drop(request_id):
                self._num_received += 1
            elif self._ends.discard(request_id):
                self._engine.release(request_id, num_kept, aborted=message.aborted)

    def _submit(self, message: Submit) -> None:
        grammar = message.completions[0].grammar
        if grammar is None or grammar.is_ready():
            self._add(message)
        else:
            # Until it is compiled, the completions count as on their way.
            self._preparation.begin(message)

    def _take_prepared(self, message: Prepared) -> None:
        wanted = self._preparation.end(message.submit)
        if message.error is None:
            self._add(wanted)
        elif wanted.completions:
            self._num_received += len(wanted.completions)
            self._refuse(wanted, message.error)

    def _add(self, message: Submit) -> None:
        self._num_received += len(message.completions)
        for position, completion in enumerate(message.completions):
            try:
                self._engine.add_request(completion)
            except SametokenError as error:
                for added in message.completions[:position]:
                    self._engine.release(added.request_id, aborted=True)
                self._refuse(message, error)
                return
        for completion in message.completions:
            self._ends.add(completion)

    def _refuse(self, message: Submit, error: SametokenError) -> None:
        ids = tuple(one.request_id for one in message.completions)
        self._outbox.put(Refused(ids, error))

    def _load(self) -> EngineLoad:
        scheduler = self._engine.scheduler
        return EngineLoad(
            num_received=self._num_received,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_usage=scheduler.kv_usage,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
        )


def run(inbox: Inbox, outbox: Outbox) -> None:
    """Build what the first message asks for, and serve until the socket closes.

    Raises:
        SametokenError: it cannot be built, a step failed, or a rank of the model ended.
    """
    launch: Launch = inbox.read_first()
    engine = launch.build(launch.config, lambda text: outbox.put(Announcement(text)))
    # As a message, so that it is heard while there is nothing to step.
    engine.peers.when_lost(lambda cause: inbox.put(Failure(cause)))
    outbox.put(Ready(summarise(engine.resolved), engine.scheduler.limits))
    loop = EngineLoop(engine, outbox, Preparation(inbox.put))
    while True:
        loop.turn(inbox.take(wait=not loop.has_unfinished))


def main(fd: int) -> int:
    """Serve over the inherited socket; the exit status is 1 after a failure."""
    sock = take_socket(fd)
    outbox = Outbox(sock)
    try:
        run(Inbox(sock), outbox)
    except Exception as error:
        outbox.put(Failure(_typed(error)))
        if not isinstance(error, SametokenError) or isinstance(error, EngineDeadError):
            raise
    finally:
        outbox.close()
    return 1


def _typed(error: Exception) -> SametokenError:
    if isinstance(error, SametokenError):
        return error
    return EngineDeadError(f"the engine process failed: {error!r}", "see its log")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

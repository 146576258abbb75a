"""The engine process: builds an engine and runs its loop.

Run as ``python -m sametoken.serving.engine_main FD``, the number of an inherited socket whose
first message is ``Launch``. Two threads move messages, so that a step waits for neither
pickling nor sockets; further threads compile grammars. The process ends when the socket closes.
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
from sametoken.io.child_process import Failure, Inbox, Outbox, take_socket
from sametoken.io.garbage import exempt_objects
from sametoken.serving.control import Control
from sametoken.serving.messages import (
    Announcement,
    Launch,
    Order,
    Prepared,
    Ready,
    Refused,
    Release,
    StepReport,
    Submit,
    Withdraw,
)
from sametoken.serving.stats import EngineLoad
from sametoken.serving.weight_updates import Done
from sametoken.types.request import EngineRequest, RequestUpdate

#: The number of grammars that the serving process validates at once, so that no queue builds up.
_THREADS = 2


class Preparation:
    """Compiles the grammars of submitted completions in threads, beside the engine's steps.

    Args:
        done: called with every prepared submission, from any thread.
    """

    def __init__(self, done: Callable[[Prepared], None]) -> None:
        self._done = done
        self._waiting: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        # The submission of each completion: an id may be reused after its request was aborted.
        self._wanted: dict[str, Submit] = {}
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"grammar {number}", daemon=True).start()

    def begin(self, submit: Submit) -> None:
        """Prepare completions, which share one grammar."""
        self._wanted |= {one.request_id: submit for one in submit.completions}
        self._waiting.put(submit)

    def drop(self, request_id: str) -> bool:
        """Forget an aborted completion; returns whether it was being prepared."""
        return self._wanted.pop(request_id, None) is not None

    def end(self, submit: Submit) -> Submit:
        """The completions of a prepared submission that were not aborted."""
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
class _Watched:
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    num_kept: int


class StopChecker:
    """Ends completions at stop tokens and length limits, in the engine process.

    The serving process finds the same end or, at a stop string, an earlier one; the engine frees
    the slot without waiting for it.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def add(self, request: EngineRequest) -> None:
        """Watch a completion."""
        self._watched[request.request_id] = _Watched(
            frozenset(request.stop_token_ids),
            request.max_total_tokens,
            len(request.prompt_token_ids),
        )

    def discard(self, request_id: str) -> bool:
        """Stop watching; returns whether the completion was watched, so had not ended."""
        return self._watched.pop(request_id, None) is not None

    def check(self, update: RequestUpdate) -> int | None:
        """Number of prompt and output tokens that a completion keeps if this update ends it.

        None if it goes on or is not watched. A failed completion is dropped: the scheduler has
        released it.
        """
        watched = self._watched.get(update.request_id)
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
    """Steps one engine for the serving process."""

    def __init__(
        self, engine: EngineCore, outbox: Outbox, preparation: Preparation, control: Control
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._preparation = preparation
        self._control = control
        self._stop_checker = StopChecker()
        self._num_received = 0
        self._num_submits = 0

    def run_iteration(self, messages: list[Any]) -> None:
        """Handle messages in order, run one step if there is work, and report.

        Raises:
            SametokenError: the step failed, or a message is a ``Failure``.
        """
        for message in messages:
            self._handle(message)
        updates: tuple[RequestUpdate, ...] = ()
        begun: tuple[str, ...] = ()
        step_seconds = None
        if self._control.may_step:
            began = time.perf_counter()
            updates = self._engine.step()
            step_seconds = time.perf_counter() - began
            begun = self._engine.begun
        for update in updates:
            num_kept = self._stop_checker.check(update)
            if num_kept is not None:
                self._engine.release(update.request_id, num_kept)
        self._control.note_step()
        self._outbox.put(StepReport(updates, self._load(), step_seconds, self._num_submits, begun))

    def _handle(
        self, message: Submit | Prepared | Release | Failure | Order | Withdraw | Done
    ) -> None:
        if isinstance(message, Failure):
            raise message.error
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Prepared):
            self._handle_prepared(message)
        elif isinstance(message, Release):
            self._release(message)
        else:
            self._control.handle(message)

    def _release(self, message: Release) -> None:
        for request_id, num_kept in message.num_kept.items():
            if self._preparation.drop(request_id):
                self._num_received += 1
            elif self._stop_checker.discard(request_id):
                self._engine.release(request_id, num_kept, aborted=message.aborted)

    def _submit(self, message: Submit) -> None:
        self._num_submits += 1
        grammar = message.completions[0].grammar
        if grammar is None or grammar.is_ready():
            self._add(message)
        else:
            # Until it is compiled, the completions count as in transit.
            self._preparation.begin(message)

    def _handle_prepared(self, message: Prepared) -> None:
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
            self._stop_checker.add(completion)

    def _refuse(self, message: Submit, error: SametokenError) -> None:
        ids = tuple(one.request_id for one in message.completions)
        self._outbox.put(Refused(ids, error, self._num_submits))

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
            swap_usage=scheduler.swap_usage,
            swapped_prefix_hits=scheduler.swapped_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            weight_version=scheduler.weight_version,
        )


def run(inbox: Inbox, outbox: Outbox) -> None:
    """Build the engine of the first message, and serve until the socket closes.

    Raises:
        SametokenError: it cannot be built, a step failed, or a rank of the model ended.
    """
    launch: Launch = inbox.read_first()
    engine = launch.build(launch.config, lambda text: outbox.put(Announcement(text)))
    # As a message, so that it also wakes an idle loop.
    engine.peers.when_lost(lambda cause: inbox.put(Failure(cause)))
    exempt_objects()
    outbox.put(Ready(summarise(engine.resolved), engine.scheduler.limits))
    control = Control(engine, inbox.put, outbox.put)
    loop = EngineLoop(engine, outbox, Preparation(inbox.put), control)
    while True:
        loop.run_iteration(inbox.take(wait=not control.may_step))


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

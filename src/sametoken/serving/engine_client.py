"""The client of the engine process: unfinished requests and the streams of their outputs."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial

from sametoken.config import EngineConfig
from sametoken.engine.input_processor import ProcessedRequest
from sametoken.engine.output_processor import OutputProcessor, ProcessedUpdates
from sametoken.errors import DrainingError, OverloadedError, RequestError, SametokenError
from sametoken.serving.engine_process import EngineProcess
from sametoken.serving.limits import QueueBound, ServingLimits
from sametoken.serving.messages import (
    Answer,
    Build,
    Command,
    FallAsleep,
    Order,
    Pause,
    Refused,
    Release,
    StepReport,
    Submit,
    Withdraw,
)
from sametoken.serving.request_stream import RequestStream
from sametoken.serving.shadow_audit import ShadowAudit
from sametoken.serving.stats import EngineLoad, EngineStats, StatsCollector
from sametoken.serving.supervisor import Supervisor
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.lora_modules import AdapterNames
from sametoken.types.outputs import RequestOutput
from sametoken.types.request import EngineRequest


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A request in the engine. Its stream lives as long as its reader holds it."""

    request: ProcessedRequest
    stream: weakref.ref[RequestStream]


class EngineClient:
    """Sends requests to the engine process, and makes outputs of its reports.

    Every request ends exactly once: finished, aborted, refused, or lost with its process.

    Attributes:
        supervisor: of the engine process.
        draining: whether new requests are refused.
        idle: set while there is no unfinished request.
        is_sleeping: whether the engine sleeps, in whole or in part.
        named: the adapters that requests may choose.
    """

    def __init__(
        self,
        process: EngineProcess,
        config: EngineConfig,
        build: Build,
        limits: ServingLimits,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.draining, self.named = False, AdapterNames(config.lora_modules)
        self.idle = asyncio.Event()
        self.idle.set()
        self._outputs = OutputProcessor(tokenizer)
        self._requests: dict[str, _Unfinished] = {}
        self._num_submits = 0
        # By id of an unfinished request or completion: the number of its ``Submit``, from 1.
        self._submits: dict[str, int] = {}
        self._queue = QueueBound(limits, process.ready.limits.max_num_seqs)
        self._collector = StatsCollector(process.ready.summary.num_speculative_tokens)
        self._audit = ShadowAudit(limits.shadow_audit_rate)
        self.is_sleeping = False
        # Whether the engine has said that it steps no more, and pauses that it has not answered.
        self._stopped = False
        self._pausing: set[int] = set()
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self.supervisor = Supervisor(process, config, build, limits, self)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self.supervisor.process is not None and not self.draining

    @property
    def stats(self) -> EngineStats:
        """A snapshot of all statistics."""
        return replace(
            self._collector.snapshot(),
            ready=self.is_ready,
            load=self._load(),
            num_restarts=self.supervisor.num_restarts,
            audit=self._audit.stats,
        )

    def _load(self) -> EngineLoad:
        """The load of requests; a replay runs alone and is none."""
        load = self._queue.load
        if not self._audit.is_replaying:
            return load
        return replace(
            load, num_running=0, num_waiting=0, num_swapped=0, num_waiting_tokens=0, kv_usage=0.0
        )

    @property
    def is_paused(self) -> bool:
        """Whether a pause holds or begins; an engine that died has none."""
        return self._stopped or bool(self._pausing)

    @property
    def awaits_report(self) -> bool:
        """Whether completions are in an engine that steps, or in transit to it."""
        return self._queue.has_unfinished and not self._stopped

    def require_ready(self) -> EngineProcess:
        """The engine process, if requests are accepted.

        Raises:
            RequestError: this is not the event loop of the engine's results.
            DrainingError, EngineRestartingError, EngineDeadError: they are not.
        """
        self.require_own_loop()
        if self.draining:
            raise DrainingError("the server takes no new requests", "send them to another one")
        return self.supervisor.require_process()

    def require_own_loop(self) -> None:
        """Check that results can be awaited here: elsewhere they would never come.

        Raises:
            RequestError: no event loop runs here, or another one.
        """
        try:
            is_own = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_own = False
        if not is_own:
            raise RequestError(
                "the engine was started in another event loop",
                "call it in that one, as by asyncio.run_coroutine_threadsafe, or use LLM",
            )

    def begin(self, request: ProcessedRequest) -> RequestStream:
        """Send a request to the engine.

        Raises:
            RequestError: it can never run, or its id is in use.
            OverloadedError: too many requests wait.
            DrainingError, EngineRestartingError, EngineDeadError: no requests are accepted.
        """
        process = self.require_ready()
        self._require_unused_ids(request)
        for completion in request.completions:
            process.ready.limits.require_possible(completion)
        try:
            self._queue.require_room(len(request.completions), len(request.prompt.token_ids))
        except OverloadedError:
            self._collector.num_overloaded += 1
            raise
        self._release_replay(self._audit.interrupt())
        stream = RequestStream(request.request_id, partial(self._abort_own, request))
        self._requests[request.request_id] = _Unfinished(request, weakref.ref(stream))
        self.idle.clear()
        self._outputs.add(request, time.monotonic(), stream=True)
        self._submit(request.completions)
        self._submits |= dict.fromkeys(_ids_of(request), self._num_submits)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request with the output so far; unknown ids are ignored."""
        self._deliver(self._outputs.abort(request_id, time.monotonic()), aborted=True)

    def _abort_own(self, request: ProcessedRequest, request_id: str) -> None:
        """Abort a request that nobody reads, and no other one that has its id since."""
        unfinished = self._requests.get(request_id)
        if unfinished is not None and unfinished.request is request:
            self.abort(request_id)

    def abort_all(self) -> None:
        """End every request with the output so far."""
        for request_id in list(self._requests):
            self.abort(request_id)

    async def command(self, command: Command) -> int:
        """Have a command carried out, or if this is cancelled withdrawn; see ``Withdraw``.

        Returns the version of the weights if it changed them, else 0.

        Raises:
            RequestError, WeightUpdateError, CheckpointError, UnsupportedError: it is refused.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        self.require_ready()
        ticket = next(self._tickets)
        if isinstance(command, Pause | FallAsleep):
            self._pausing.add(ticket)
            # A replay would hold up a pause that waits, and refuse a sleep.
            self._release_replay(self._audit.interrupt())
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        self.supervisor.send(Order(ticket, command))
        try:
            return await answer
        except asyncio.CancelledError:
            self.supervisor.send(Withdraw(ticket))
            raise
        finally:
            del self._answers[ticket]

    def _take_answer(self, message: Answer) -> None:
        self._pausing.discard(message.ticket)
        # A paused engine reports nothing, and is not hung.
        self._stopped, self.is_sleeping = message.paused, message.sleeps
        load = self._queue.load
        if message.adapted or (message.error is None and message.version > load.weight_version):
            # The report that has it follows the answer.
            version = max(message.version, load.weight_version)
            self._queue.note_load(replace(load, weight_version=version))
            self._release_replay(self._audit.change(self._num_submits))
        answer = self._answers.get(message.ticket)
        if answer is not None and not answer.done():
            if message.error is None:
                answer.set_result(message.version)
            else:
                answer.set_exception(message.error)
        self._use_idle_time()

    # Listener

    def engine_died(self, cause: SametokenError) -> None:
        """See ``Listener``: every unfinished request fails."""
        self._stopped = self.is_sleeping = False
        self._pausing.clear()
        self.named.restart()
        for ticket in list(self._answers):
            self._take_answer(Answer(ticket, error=copy.copy(cause)))
        self._audit.restart(self._queue.load.weight_version)
        self._queue.reset()
        self._num_submits = 0
        for request_id in list(self._requests):
            self._fail(request_id, cause)
        self.idle.set()

    def engine_started(self) -> None:
        """See ``Listener``."""
        self._use_idle_time()

    def take(self, message: StepReport | Refused | Answer) -> None:
        """See ``Listener``."""
        if isinstance(message, Answer):
            self._take_answer(message)
            return
        if isinstance(message, Refused):
            self._take_refusal(message)
            return
        self._queue.note_load(message.load)
        if message.step_seconds is not None:
            self._collector.count_step(message.step_seconds)
        # Of an id that was used again, updates of the aborted request may still come.
        taken, now = message.num_submits, time.monotonic()
        updates = [one for one in message.updates if self._submits.get(one.request_id, 0) <= taken]
        for update in updates:
            if update.request_id in self._submits:
                self._collector.count_update(update)
        self._release_replay(self._audit.take(updates))
        begun = [one for one in message.begun if self._submits.get(one, 0) <= taken]
        self._outputs.begin(begun, now - (message.step_seconds or 0.0))
        processed = self._outputs.process(updates, now)
        self._collector.count_tokens(processed.num_tokens)
        self._deliver(processed)

    def _take_refusal(self, refusal: Refused) -> None:
        refused = [
            request_id
            for request_id, unfinished in self._requests.items()
            if unfinished.request.completions[0].request_id in refusal.request_ids
            and self._submits[request_id] <= refusal.num_submits
        ]
        for request_id in refused:
            self._fail(request_id, refusal.error)
        self._audit.take_refusal(refusal.request_ids)
        self._use_idle_time()

    # Requests

    def _require_unused_ids(self, request: ProcessedRequest) -> None:
        """Refuse ids in use; the completions' ids derive from the request's."""
        for request_id in _ids_of(request) & self._submits.keys():
            raise RequestError(
                f"request {request_id!r} is already here", "choose another request id"
            )

    def _submit(self, completions: tuple[EngineRequest, ...]) -> None:
        self._num_submits += 1
        self._queue.note_sent(len(completions), len(completions[0].prompt_token_ids))
        self.supervisor.send(Submit(completions))

    def _release_replay(self, request_id: str | None) -> None:
        if request_id is not None:
            self.supervisor.send(Release({request_id: None}, aborted=True))

    def _deliver(self, processed: ProcessedUpdates, *, aborted: bool = False) -> None:
        """Pass outputs to their readers, and release ended completions in the engine."""
        if processed.released:
            self.supervisor.send(Release(processed.released, aborted))
        for one in processed.shown:
            if one.finished:
                self._finish(one.output())
            elif (stream := self._requests[one.request_id].stream()) is not None:
                stream.grow(one.output)
        self._use_idle_time()

    def _finish(self, output: RequestOutput) -> None:
        number = self._submits[output.request_id]
        finished = self._remove(output.request_id)
        stream = finished.stream()
        if stream is not None:
            stream.put(output)
        self._collector.count_finished(output)
        self._queue.note_finished(time.monotonic())
        if output.weight_versions == (self._queue.load.weight_version,) * 2:
            self._audit.note_finished(finished.request, output, number)

    def _fail(self, request_id: str, error: SametokenError) -> None:
        self._outputs.forget(request_id)
        stream = self._remove(request_id).stream()
        if stream is not None:
            # A copy for each reader: raising adds a traceback to it.
            stream.fail(copy.copy(error))
        self._collector.num_failed += 1

    def _remove(self, request_id: str) -> _Unfinished:
        unfinished = self._requests.pop(request_id)
        for one in _ids_of(unfinished.request):
            del self._submits[one]
        return unfinished

    def _use_idle_time(self) -> None:
        if self._requests:
            return
        self.idle.set()
        replay = self._audit.begin() if self.is_ready and not self.is_paused else None
        if replay is not None:
            self._submit((replay,))


def _ids_of(request: ProcessedRequest) -> set[str]:
    return {request.request_id, *(one.request_id for one in request.completions)}

"""The engine's loop: enqueue steps ahead of the device, process outputs behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from sametoken.distributed.process_group import NoPeers, Peers
from sametoken.engine.live_adapters import LiveAdapters, NoLiveAdapters
from sametoken.engine.modes import without_modes
from sametoken.engine.resolve import ResolvedConfig
from sametoken.engine.sleep import FixedMemory, Memory, Sleep
from sametoken.engine.upkeep import Upkeep
from sametoken.engine.weights import FixedWeights, Weights
from sametoken.errors import EngineDeadError
from sametoken.extraction.recording import Extraction, NoExtraction
from sametoken.runner.async_output import PendingOutput
from sametoken.runner.runner import Runner
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.request import EngineRequest, RequestUpdate

T = TypeVar("T")


class EngineCore:
    """Runs requests of token ids, with up to ``steps_in_flight`` steps enqueued at once.

    Attributes:
        resolved: every setting.
        scheduler: the scheduler of the requests.
        peers: processes that share the model; once one has ended, the next step fails.
        weights: loads new weights; any thread may do so while steps run.
        sleep: which parts of its memory sleep.
        adapters: those that requests may have.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        scheduler: Scheduler,
        runner: Runner,
        extraction: Extraction | None = None,
        peers: Peers | None = None,
        weights: Weights | None = None,
        memory: Memory | None = None,
        adapters: LiveAdapters | None = None,
    ) -> None:
        self.resolved = resolved
        self.scheduler = scheduler
        self._runner = runner
        self._extraction = extraction or NoExtraction()
        self.peers = peers or NoPeers()
        self.weights = weights or FixedWeights("models that were built by hand")
        self.sleep = Sleep(memory or FixedMemory("models that were built by hand"))
        self.adapters = adapters or NoLiveAdapters()
        self._in_flight: deque[PendingOutput] = deque()
        # Of steps that were processed by ``at_rest``, for the next call of ``step``.
        self._ready: tuple[RequestUpdate, ...] = ()
        #: Requests whose first step the last call of ``step`` enqueued.
        self.begun: tuple[str, ...] = ()
        self._failure: BaseException | None = None

    @property
    def upkeep(self) -> Upkeep:
        """What may be done between steps."""
        return Upkeep(self)

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has work to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight) or bool(self._ready)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; it keeps the adapter that has its ``lora_name`` now.

        Raises:
            RequestError: the request can never run; other requests are not affected.
            EngineDeadError: the engine has failed.
        """
        self.require_alive()
        if request.lora_name is not None:
            request = replace(request, adapter=self.adapters.number(request.lora_name))
        self.scheduler.add(request)

    def release(
        self, request_id: str, num_kept_tokens: int | None = None, *, aborted: bool = False
    ) -> None:
        """End a finished or aborted request; unknown ids are ignored, as are all after a failure.

        No later step has updates of it, so its id may be used again.

        Args:
            request_id: the request.
            num_kept_tokens: tokens of prompt and output that were kept, whose KV may be cached;
                None if unknown.
            aborted: whether it was ended before it finished.
        """
        # After an interrupted step the scheduler's state is not consistent.
        if self._failure is not None:
            return
        self.scheduler.release(request_id, num_kept_tokens)
        self._ready = tuple(one for one in self._ready if one.request_id != request_id)
        self._extraction.end(request_id, num_kept_tokens, aborted=aborted)
        self._flush_at_rest()

    def stop(self, cause: BaseException) -> None:
        """Refuse all further work; the first cause is kept."""
        if self._failure is None:
            self._failure = cause

    def step(self) -> tuple[RequestUpdate, ...]:
        """Enqueue the next step, and process the oldest one's output once enough are in flight.

        Raises:
            EngineDeadError: the step failed; every unfinished request is lost.
        """
        return self._guarded(self._step)

    def at_rest(self, work: Callable[[], None] = lambda: None) -> None:
        """Do work between two steps, once those in flight are processed; errors as in ``step``."""

        def landed() -> None:
            while self._in_flight:
                self._ready += self._process_oldest()
            work()

        self._guarded(landed)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do work that advances the device state; no request survives its failure."""
        self.require_alive()
        try:
            with without_modes():
                return work()
        except BaseException as error:
            # An interrupted step, by Ctrl-C too, leaves the device state inconsistent.
            self.stop(error)
            self._extraction.close()
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"a step failed: {error!r}", "restart the engine") from error

    def _step(self) -> tuple[RequestUpdate, ...]:
        updates, self._ready = self._ready, ()
        self.sleep.require_awake()
        plan = self.scheduler.plan()
        self.begun = tuple(one.request_id for one in plan.admissions) if plan is not None else ()
        if plan is not None:
            self._in_flight.append(self._runner.submit(plan))
            self._extraction.launch(plan)
        may_plan_on = plan is not None and len(self._in_flight) < self.resolved.steps_in_flight
        if self._in_flight and not may_plan_on:
            updates += self._process_oldest()
            self._flush_at_rest()
        return updates

    def _process_oldest(self) -> tuple[RequestUpdate, ...]:
        result = self._in_flight.popleft().wait()
        self._extraction.process_output(result)
        return self.scheduler.process_output(result)

    def _flush_at_rest(self) -> None:
        if not self.has_unfinished:
            self._extraction.flush()

    def require_alive(self) -> None:
        """Raise ``EngineDeadError`` if the engine has failed."""
        if self._failure is not None:
            how = "" if isinstance(self._failure, Exception) else " cut a step short"
            raise EngineDeadError(
                f"the engine stopped after {self._failure!r}{how}", "restart the engine"
            )

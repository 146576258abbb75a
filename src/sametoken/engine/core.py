"""The engine's loop: enqueue steps ahead of the device, process outputs behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from sametoken.distributed.process_group import NoPeers, Peers
from sametoken.engine.resolve import ResolvedConfig
from sametoken.engine.sleep import DROP_WEIGHTS, FixedMemory, Memory, Sleep
from sametoken.engine.weights import FixedWeights, NewWeights, Weights
from sametoken.errors import EngineDeadError, RequestError, WeightUpdateError
from sametoken.extraction.recording import Extraction, NoExtraction
from sametoken.runner.async_output import PendingOutput
from sametoken.runner.runner import Runner
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.weight_updates import MODEL

T = TypeVar("T")


class EngineCore:
    """Runs requests of token ids, with up to ``steps_in_flight`` steps enqueued at once.

    Attributes:
        resolved: every setting.
        scheduler: the scheduler of the requests.
        weights: loads new weights; any thread may do so while steps run.
        peers: processes that share the model; once one has ended, the next step fails.
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
    ) -> None:
        self.resolved = resolved
        self.scheduler = scheduler
        self._runner = runner
        self._extraction = extraction or NoExtraction()
        self.peers = peers or NoPeers()
        self.weights = weights or FixedWeights("models that were built by hand")
        self._sleep = Sleep(memory or FixedMemory("models that were built by hand"))
        self._in_flight: deque[PendingOutput] = deque()
        # Of steps that were processed before new weights came, for the next call of ``step``.
        self._ready: tuple[RequestUpdate, ...] = ()
        self._failure: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has work to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight) or bool(self._ready)

    def use_weights(self, new: NewWeights, version: int | None = None) -> int:
        """Write new weights from ``weights.load`` over the old ones, between steps.

        Call it in their ``used_or_dropped``.

        Returns:
            The version from now on: ``version``, or the next one. Running requests keep their KV.

        Raises:
            WeightUpdateError: the version does not fit, or no room is left; nothing is changed.
            EngineDeadError: the engine has failed, or a step fails now.
        """
        self._require_alive()
        if self._sleep.lacks_weights and not new.of_target:
            raise WeightUpdateError(
                "a drafter may share weights that were dropped", "update the model first"
            )
        version = new.version_after(self.scheduler.weight_version, version)
        self._sleep.begin_update()
        self._guarded(lambda: self._write(new, version))
        return version

    @property
    def is_sleeping(self) -> bool:
        """Whether some part sleeps, so that ``step`` may not be called."""
        return bool(self._sleep.asleep)

    def require_sleep(self, level: int) -> None:
        """Refuse a sleep that this engine can never have; errors as in ``sleep``."""
        self._sleep.require_possible(level)
        if level == DROP_WEIGHTS:
            self.weights.require_target(MODEL)

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``; requests that wait go on waiting.

        Args:
            level: 1 gives back KV and prefix cache; 2 the target's weights too.

        Raises:
            RequestError: there is no such level, or requests run.
            UnsupportedError: this engine's memory cannot be given back.
            EngineDeadError: the engine has failed, or a step fails now.
        """
        self.require_sleep(level)
        self._guarded(self._land)
        if self.scheduler.num_running or self.scheduler.num_swapped:
            raise RequestError("requests run, whose KV is needed", "let them end first")
        self.forget_prefixes()
        self._sleep.begin(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End the sleep of "weights" and "kv_cache", or of one of them.

        Raises:
            RequestError: no such part, no room for it, or weights were dropped and not updated.
            EngineDeadError: the engine has failed.
        """
        self._require_alive()
        self._sleep.end(tags)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache in the engine's memory.

        Raises:
            EngineDeadError: the engine has failed.
        """
        self._require_alive()
        self.scheduler.forget_prefixes()

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never run; other requests are not affected.
            EngineDeadError: the engine has failed.
        """
        self._require_alive()
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

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do work that advances the device state; no request survives its failure."""
        self._require_alive()
        try:
            return work()
        except BaseException as error:
            # An interrupted step, by Ctrl-C too, leaves the device state inconsistent.
            self.stop(error)
            self._extraction.close()
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"a step failed: {error!r}", "restart the engine") from error

    def _write(self, new: NewWeights, version: int) -> None:
        self._land()
        new.replacement.write()
        if new.of_target:
            self.scheduler.begin_weights(version)
            self._sleep.lacks_weights &= not new.replacement.pairs

    def _land(self) -> None:
        while self._in_flight:
            self._ready += self._process_oldest()

    def _step(self) -> tuple[RequestUpdate, ...]:
        ready, self._ready = self._ready, ()
        return ready + self._advance()

    def _advance(self) -> tuple[RequestUpdate, ...]:
        self._sleep.require_awake()
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self._runner.submit(plan))
            self._extraction.launch(plan)
        may_plan_on = plan is not None and len(self._in_flight) < self.resolved.steps_in_flight
        if may_plan_on or not self._in_flight:
            return ()
        updates = self._process_oldest()
        self._flush_at_rest()
        return updates

    def _process_oldest(self) -> tuple[RequestUpdate, ...]:
        result = self._in_flight.popleft().wait()
        self._extraction.process_output(result)
        return self.scheduler.process_output(result)

    def _flush_at_rest(self) -> None:
        if not self.has_unfinished:
            self._extraction.flush()

    def _require_alive(self) -> None:
        if self._failure is not None:
            how = "" if isinstance(self._failure, Exception) else " cut a step short"
            raise EngineDeadError(
                f"the engine stopped after {self._failure!r}{how}", "restart the engine"
            )

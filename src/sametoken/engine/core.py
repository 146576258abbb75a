"""The engine's loop: plan ahead, settle behind."""

from __future__ import annotations

from collections import deque

from sametoken.distributed.process_group import (
    NoPeers,
    Peers,
)
from sametoken.engine.resolve import ResolvedConfig
from sametoken.errors import EngineDeadError
from sametoken.extraction.recording import (
    Extraction,
    NoExtraction,
)
from sametoken.runner.async_output import PendingOutput
from sametoken.runner.runner import Runner
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)


class EngineCore:
    """Token ids in, token ids out, with up to ``steps_in_flight`` steps enqueued at once.

    Attributes:
        resolved: every setting.
        scheduler: of the requests.
        peers: processes that share the model; the next step fails once one of them has ended.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        scheduler: Scheduler,
        runner: Runner,
        extraction: Extraction | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.resolved = resolved
        self.scheduler = scheduler
        self._runner = runner
        self._extraction = extraction or NoExtraction()
        self.peers = peers or NoPeers()
        self._in_flight: deque[PendingOutput] = deque()
        self._failure: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of ``step`` has anything to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never run; nothing else is affected.
            EngineDeadError: the engine failed before.
        """
        self._require_alive()
        self.scheduler.add(request)

    def release(
        self, request_id: str, num_kept_tokens: int | None = None, *, aborted: bool = False
    ) -> None:
        """End a request, finished or aborted; unknown ids are ignored, and all once it is dead.

        Args:
            request_id: whom to end.
            num_kept_tokens: tokens of prompt and output that were not cut, whose KV may
                serve later prompts; None if that is not known.
            aborted: it was ended before its time.
        """
        # A step cut short leaves the scheduler in no state to be asked.
        if self._failure is not None:
            return
        self.scheduler.release(request_id, num_kept_tokens)
        self._extraction.end(request_id, num_kept_tokens, aborted=aborted)
        self._flush_at_rest()

    def stop(self, cause: BaseException) -> None:
        """Serve nothing from now on; the first cause is kept."""
        if self._failure is None:
            self._failure = cause

    def step(self) -> tuple[RequestUpdate, ...]:
        """Enqueue the next step; settle the oldest once enough are in flight.

        Raises:
            EngineDeadError: the step failed; every unfinished request is lost.
        """
        self._require_alive()
        try:
            return self._step()
        except BaseException as error:
            # A step cut short, by Ctrl-C too, leaves the device's truth half written.
            self.stop(error)
            self._extraction.close()
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"a step failed: {error!r}", "restart the engine") from error

    def _step(self) -> tuple[RequestUpdate, ...]:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self._runner.submit(plan))
            self._extraction.launch(plan)
        may_plan_on = plan is not None and len(self._in_flight) < self.resolved.steps_in_flight
        if may_plan_on or not self._in_flight:
            return ()
        result = self._in_flight.popleft().wait()
        self._extraction.process_output(result)
        updates = self.scheduler.process_output(result)
        self._flush_at_rest()
        return updates

    def _flush_at_rest(self) -> None:
        if not self.has_unfinished:
            self._extraction.flush()

    def _require_alive(self) -> None:
        if self._failure is not None:
            how = "" if isinstance(self._failure, Exception) else " cut a step short"
            raise EngineDeadError(
                f"the engine stopped after {self._failure!r}{how}", "restart the engine"
            )

"""Supervises the engine process: restarts with backoff, and a watchdog for hung steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Protocol

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError, EngineRestartingError, SametokenError
from sametoken.serving.engine_process import EngineProcess
from sametoken.serving.limits import ServingLimits
from sametoken.serving.messages import Build
from sametoken.serving.watchdog import Watchdog

_logger = logging.getLogger("sametoken")

#: The remedy for who serves and for who calls ``AsyncLLM``.
_START_ANOTHER = "start the server again, or in Python another AsyncLLM"


class Listener(Protocol):
    """The supervisor's callbacks, called in order on the event loop."""

    @property
    def awaits_report(self) -> bool:
        """Whether the engine has work, and so must report soon."""
        ...

    def take(self, message: Any) -> None:
        """Handle a message of the engine."""
        ...

    def engine_died(self, cause: SametokenError) -> None:
        """Handle the loss of the engine process and of everything in it."""
        ...

    def engine_started(self) -> None:
        """Handle the start of another engine process, which is ready."""
        ...


class Supervisor:
    """Reads the engine process's messages and starts another process when it dies.

    A process that has work and does not report for ``step_timeout_s`` is hung, and is killed.

    Args:
        process: the first one, ready to serve.
        config, build: arguments of later processes.
        limits: the limits of restarts and of a step's time.
        listener: receives messages and events.

    Attributes:
        process: the engine process; None while there is none.
        cause: why there is none; None while one is up.
        num_restarts: engine processes started after the first.
    """

    def __init__(
        self,
        process: EngineProcess,
        config: EngineConfig,
        build: Build,
        limits: ServingLimits,
        listener: Listener,
    ) -> None:
        self.process: EngineProcess | None = process
        self.cause: SametokenError | None = None
        self.num_restarts = 0
        self._launch = (config, build)
        self._restarts = Restarts(limits)
        self._step_timeout_s = limits.step_timeout_s
        self._watchdog = Watchdog(limits.step_timeout_s, self._kill_hung)
        self._listener = listener
        self._given_up = False
        self._task = asyncio.get_running_loop().create_task(self._serve(process))

    def send(self, message: Any) -> None:
        """Send a message; without an engine process it is lost, like its requests."""
        if self.process is not None:
            self.process.send(message)
            if self._listener.awaits_report:
                self._watchdog.arm()

    def require_process(self) -> EngineProcess:
        """The engine process.

        Raises:
            EngineRestartingError: it died and is being restarted.
            EngineDeadError: it will not be restarted.
        """
        if self.process is not None:
            return self.process
        why = self.cause.cause if self.cause else "it ended"
        if self._given_up:
            raise EngineDeadError(f"the engine is gone ({why})", _START_ANOTHER)
        raise EngineRestartingError(
            f"the engine is being started again ({why})", "try again in a few seconds"
        )

    async def stop(self) -> None:
        """End the engine process for good, also if this is cancelled."""
        self._given_up = True
        self._watchdog.disarm()
        self._task.cancel()
        try:
            await asyncio.wait((self._task,))
        finally:
            process, self.process = self.process, None
            if process is not None:
                self.cause = EngineDeadError("the engine was shut down", _START_ANOTHER)
                self._listener.engine_died(self.cause)
                await process.stop()

    async def _serve(self, first: EngineProcess) -> None:
        process: EngineProcess | None = first
        while process is not None:
            cause = await self._follow(process)
            _logger.error("the engine died: %s", cause)
            self.process, self.cause = None, cause
            # A dead process will not report.
            self._watchdog.disarm()
            self._listener.engine_died(cause)
            process = await self._next()

    async def _follow(self, process: EngineProcess) -> SametokenError:
        """Pass the engine's messages on until it dies; returns the cause."""
        try:
            while (message := await process.receive()) is not None:
                self._watchdog.disarm()
                self._listener.take(message)
                if self._listener.awaits_report:
                    self._watchdog.arm()
        except Exception as error:
            # Requests whose results cannot be processed must fail.
            _logger.exception("the engine's results cannot be processed")
            process.kill(EngineDeadError(f"results cannot be processed: {error!r}", "see the log"))
        return await process.stop()

    def _kill_hung(self) -> None:
        if self.process is not None:
            cause = f"a step took more than {self._step_timeout_s:g} s"
            self.process.kill(
                EngineDeadError(cause, "send the request again; see --step-timeout-s")
            )

    async def _next(self) -> EngineProcess | None:
        """Start the next engine process; None if there were too many restarts."""
        while (delay := self._restarts.next_delay(time.monotonic())) is not None:
            await asyncio.sleep(delay)
            try:
                process = await EngineProcess.start(*self._launch)
            except (SametokenError, OSError) as error:
                _logger.error("the engine cannot be started again: %s", error)
                self.cause = EngineDeadError(f"it cannot be started again: {error}")
                continue
            self.num_restarts += 1
            self.process, self.cause = process, None
            self._listener.engine_started()
            return process
        self._given_up = True
        return None


class Restarts:
    """Limits restarts within a time window, with exponential backoff."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Count a restart; returns the seconds to wait before it, or None if none is left.

        Args:
            now: seconds of a monotonic clock.
        """
        while self._times and now - self._times[0] > self._limits.restart_window_s:
            self._times.popleft()
        num_recent = len(self._times)
        if num_recent >= self._limits.max_restarts:
            return None
        self._times.append(now)
        return self._limits.restart_backoff_s * 2.0**num_recent

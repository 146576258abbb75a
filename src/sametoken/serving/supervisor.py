"""Keeps an engine process running: one after the other, until too many have died.

When a dead engine process may be started again.

Notices when something that must come does not come any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from sametoken.config import EngineConfig
from sametoken.errors import EngineDeadError, EngineRestartingError, SametokenError
from sametoken.serving.engine_process import EngineProcess
from sametoken.serving.limits import ServingLimits
from sametoken.serving.messages import Build

_logger = logging.getLogger("sametoken")


class Listener(Protocol):
    """Whom the supervisor tells; all on the event loop, in order."""

    @property
    def awaits_report(self) -> bool:
        """Whether the engine has work, and so must report soon."""
        ...

    def take(self, message: Any) -> None:
        """The engine said this."""
        ...

    def engine_died(self, cause: SametokenError) -> None:
        """The engine process is gone, and everything in it is lost."""
        ...

    def engine_started(self) -> None:
        """Another engine process is ready."""
        ...


class Supervisor:
    """Follows the engine process and starts another one when it dies.

    A process that has work and does not report for ``step_timeout_s`` is hung, and is killed.

    Args:
        process: the first one, ready to serve.
        config, build: what every further one is started with.
        limits: how often that may happen, and how long a step may take.
        listener: whom to tell.

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
        """Send a message; without an engine process it is lost, as its requests are."""
        if self.process is not None:
            self.process.send(message)
            if self._listener.awaits_report:
                self._watchdog.expect()

    def require_process(self) -> EngineProcess:
        """The engine process.

        Raises:
            EngineRestartingError: it died and another one is being started.
            EngineDeadError: it is gone for good.
        """
        if self.process is not None:
            return self.process
        why = self.cause.cause if self.cause else "it ended"
        if self._given_up:
            raise EngineDeadError(f"the engine is gone ({why})", "start the server again")
        raise EngineRestartingError(
            f"the engine is being started again ({why})", "try again in a few seconds"
        )

    async def stop(self) -> None:
        """End the engine process, and start no other."""
        self._given_up = True
        self._watchdog.rest()
        self._task.cancel()
        await asyncio.wait((self._task,))
        process, self.process = self.process, None
        if process is not None:
            self.cause = EngineDeadError("the engine was shut down")
            self._listener.engine_died(self.cause)
            await process.stop()

    async def _serve(self, first: EngineProcess) -> None:
        process: EngineProcess | None = first
        while process is not None:
            cause = await self._follow(process)
            _logger.error("the engine died: %s", cause)
            self.process, self.cause = None, cause
            # What was sent to the dead process is not waited for.
            self._watchdog.rest()
            self._listener.engine_died(cause)
            process = await self._next()

    async def _follow(self, process: EngineProcess) -> SametokenError:
        """Pass the engine's messages on until it dies; why it did."""
        try:
            while (message := await process.receive()) is not None:
                self._watchdog.rest()
                self._listener.take(message)
                if self._listener.awaits_report:
                    self._watchdog.expect()
        except Exception as error:
            # Whoever waits for results that cannot be taken in must be told.
            _logger.exception("the engine's results cannot be taken in")
            process.kill(EngineDeadError(f"results cannot be taken in: {error!r}", "see the log"))
        return await process.stop()

    def _kill_hung(self) -> None:
        if self.process is not None:
            cause = f"a step took more than {self._step_timeout_s:g} s"
            self.process.kill(
                EngineDeadError(cause, "send the request again; see --step-timeout-s")
            )

    async def _next(self) -> EngineProcess | None:
        """The next engine process, ready; None if too many have died lately."""
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
    """Bounds restarts within a window of time, and spaces them out."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next restart, which is counted; None if none is left.

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


class Watchdog:
    """Calls ``expired`` on the event loop once it was left waiting for too long.

    Args:
        timeout_s: seconds that waiting may take; 0 for any.
        expired: called once per wait that took too long.
    """

    def __init__(self, timeout_s: float, expired: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Something is to come; a wait that has begun goes on."""
        if self._timer is None and self._timeout_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._expired)

    def rest(self) -> None:
        """It has come, or will not be waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

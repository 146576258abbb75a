"""Pauses and new weights of the engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.engine.weights import NewWeights
from sametoken.errors import RequestError, SametokenError, UnsupportedError, WeightUpdateError
from sametoken.serving.messages import (
    Answer,
    ChangeWeights,
    FallAsleep,
    FinishUpdate,
    ForgetPrefixes,
    NameWeights,
    Order,
    Pause,
    Resume,
    WakeUp,
    WeightCommand,
)
from sametoken.serving.weight_updates import Done, WeightUpdates


class Control:
    """Decides whether the engine may step, and changes its weights.

    New weights are read by a thread, beside the engine's steps, and written between two of them.

    Args:
        engine: the engine.
        post: brings a ``Done`` to ``handle``, from any thread.
        answer: sends an ``Answer``.
    """

    def __init__(
        self, engine: EngineCore, post: Callable[[Any], None], answer: Callable[[Any], None]
    ) -> None:
        self._engine = engine
        self._updates = WeightUpdates(engine.weights, engine.resolved.device, post)
        self._send = answer
        self._paused = False
        # Pauses that wait for running requests.
        self._waiting: list[int] = []

    @property
    def may_step(self) -> bool:
        """Whether there is work, and no pause."""
        return self._engine.has_unfinished and not self._paused

    def handle(self, message: Order | Done) -> None:
        """Handle a command, and answer it now or later.

        Raises:
            EngineDeadError: a step in flight failed.
        """
        if isinstance(message, Done):
            self._use(message)
            self._updates.used()
            return
        command = message.command
        if isinstance(command, Pause):
            self._waiting.append(message.ticket)
            self._engine.scheduler.admits = False
            self._paused = not command.wait
            self.note_step()
        elif isinstance(command, WeightCommand):
            self._updates.begin(message)
        else:
            try:
                self._obey(command)
            except (RequestError, WeightUpdateError, UnsupportedError) as error:
                self._answer(message.ticket, error=error)
            else:
                self._answer(message.ticket)

    def _obey(self, command: Resume | FallAsleep | WakeUp | ForgetPrefixes) -> None:
        if isinstance(command, ForgetPrefixes):
            self._engine.scheduler.forget_prefixes()
        elif isinstance(command, FallAsleep):
            if not self._paused:
                raise RequestError("the engine runs", "pause it first")
            self._engine.sleep(command.level)
        elif isinstance(command, WakeUp):
            self._engine.wake_up(command.tags)
            if not self._engine.is_sleeping:
                self._resume()
        elif self._engine.is_sleeping:
            raise RequestError("the engine sleeps", "wake it up, which resumes too")
        else:
            self._resume()

    def _resume(self) -> None:
        # Pauses that wait end here.
        self._paused = True
        self.note_step()
        self._paused, self._engine.scheduler.admits = False, True

    def _answer(self, ticket: int, version: int = 0, error: SametokenError | None = None) -> None:
        self._send(Answer(ticket, version, error, self._paused, self._engine.is_sleeping))

    def note_step(self) -> None:
        """Begin and answer pauses that need not wait any longer; call it after each step."""
        scheduler = self._engine.scheduler
        runs = scheduler.num_running or scheduler.num_swapped
        if self._waiting and (self._paused or not runs):
            self._paused = True
            for ticket in self._waiting:
                self._answer(ticket)
            self._waiting.clear()

    def _use(self, done: Done) -> None:
        command, result, version = done.order.command, done.result, 0
        if isinstance(result, NewWeights):
            assert isinstance(command, ChangeWeights | FinishUpdate | NameWeights)
            try:
                version, result = self._engine.use_weights(result, command.version), None
            except WeightUpdateError as error:
                result = error
        self._answer(done.order.ticket, version, result)

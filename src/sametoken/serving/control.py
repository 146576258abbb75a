"""Pauses and new weights of the engine process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.engine.weights import NewWeights
from sametoken.errors import (
    RequestError,
    SametokenError,
    UnsupportedError,
    WeightUpdateError,
)
from sametoken.serving.messages import (
    Answer,
    ChangeWeights,
    Command,
    FallAsleep,
    FinishUpdate,
    ForgetPrefixes,
    NameWeights,
    Pause,
    Resume,
    WakeUp,
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

    def handle(self, message: Command | Done) -> None:
        """Handle a command, and answer it now or later.

        Raises:
            EngineDeadError: a step in flight failed.
        """
        if isinstance(message, Pause):
            self._waiting.append(message.ticket)
            self._engine.scheduler.admits = False
            self._paused = not message.wait
            self.note_step()
        elif isinstance(message, Resume | FallAsleep | WakeUp):
            self._answer(self._obey(message))
        elif isinstance(message, ForgetPrefixes):
            self._engine.scheduler.forget_prefixes()
            self._answer(Answer(message.ticket))
        elif isinstance(message, Done):
            self._answer(self._use(message))
            self._updates.used()
        else:
            self._updates.begin(message)

    def _obey(self, message: Resume | FallAsleep | WakeUp) -> Answer:
        try:
            if isinstance(message, FallAsleep):
                if not self._paused:
                    raise RequestError("the engine runs", "pause it first")
                self._engine.sleep(message.level)
            elif isinstance(message, WakeUp):
                self._engine.wake_up(message.tags)
                if not self._engine.is_sleeping:
                    self._resume()
            elif self._engine.is_sleeping:
                raise RequestError("the engine sleeps", "wake it up, which resumes too")
            else:
                self._resume()
        except (RequestError, WeightUpdateError, UnsupportedError) as error:
            return Answer(message.ticket, error=error)
        return Answer(message.ticket)

    def _resume(self) -> None:
        # Pauses that wait end here.
        self._paused = True
        self.note_step()
        self._paused, self._engine.scheduler.admits = False, True

    def _answer(self, answer: Answer) -> None:
        sleeps = self._engine.is_sleeping
        self._send(replace(answer, paused=self._paused, sleeps=sleeps))

    def note_step(self) -> None:
        """Begin and answer pauses that need not wait any longer; call it after each step."""
        scheduler = self._engine.scheduler
        runs = scheduler.num_running or scheduler.num_swapped
        if self._waiting and (self._paused or not runs):
            self._paused = True
            for ticket in self._waiting:
                self._answer(Answer(ticket))
            self._waiting.clear()

    def _use(self, done: Done) -> Answer:
        message, result = done.message, done.result
        if isinstance(result, SametokenError):
            return Answer(message.ticket, error=result)
        if not isinstance(result, NewWeights):
            return Answer(message.ticket)
        assert isinstance(message, ChangeWeights | FinishUpdate | NameWeights)
        try:
            return Answer(message.ticket, self._engine.use_weights(result, message.version))
        except WeightUpdateError as error:
            return Answer(message.ticket, error=error)

"""Pauses and new weights of the engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.engine.live_adapters import NewAdapter
from sametoken.engine.upkeep import used_or_dropped
from sametoken.engine.weights import NewWeights
from sametoken.errors import RequestError, SametokenError, UnsupportedError, WeightUpdateError
from sametoken.serving.messages import (
    Answer,
    ChangeWeights,
    CheckSleep,
    Command,
    FallAsleep,
    FinishUpdate,
    ForgetPrefixes,
    NameWeights,
    Order,
    Pause,
    RemoveAdapter,
    Resume,
    WakeUp,
    WeightCommand,
    Withdraw,
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
        self._updates = WeightUpdates(engine.weights, engine.adapters, engine.resolved.device, post)
        self._send = answer
        self._paused = False
        # Pauses by ticket: those that wait for running requests, and those in force.
        self._waiting: dict[int, Pause | FallAsleep] = {}
        self._held: set[int] = set()
        # Orders whose weights are to be used.
        self._wanted: set[int] = set()

    @property
    def may_step(self) -> bool:
        """Whether there is work, and no pause."""
        return self._engine.has_unfinished and not self._paused

    def handle(self, message: Order | Withdraw | Done) -> None:
        """Handle a command, and answer it now or later.

        Raises:
            EngineDeadError: a step in flight failed.
        """
        if isinstance(message, Done):
            self._use(message)
            self._updates.used()
        elif isinstance(message, Withdraw):
            self._wanted.discard(message.ticket)
            self._end_pause(message.ticket)
            self._answer(message.ticket)
        elif isinstance(message.command, Pause | FallAsleep):
            self._waiting[message.ticket] = message.command
            self._engine.scheduler.admits = False
            self._paused = not message.command.wait
            self.note_step()
        elif isinstance(message.command, WeightCommand):
            self._wanted.add(message.ticket)
            self._updates.begin(message)
        else:
            self._carry_out(message.ticket, message.command)

    def _carry_out(self, ticket: int, command: Command) -> None:
        try:
            self._obey(command)
        except (RequestError, WeightUpdateError, UnsupportedError) as error:
            self._end_pause(ticket)
            self._answer(ticket, error=error)
        else:
            self._answer(ticket)

    def _obey(self, command: Command) -> None:
        if isinstance(command, ForgetPrefixes):
            self._engine.upkeep.forget_prefixes()
        elif isinstance(command, RemoveAdapter):
            self._engine.upkeep.remove_adapter(command.name)
        elif isinstance(command, CheckSleep):
            self._engine.upkeep.require_sleep(command.level)
        elif isinstance(command, FallAsleep):
            self._engine.upkeep.sleep(command.level)
        elif isinstance(command, WakeUp):
            self._engine.upkeep.wake_up(command.tags)
            if not self._engine.upkeep.is_sleeping:
                self._resume()
        elif isinstance(command, Resume):
            self._resume()

    def _resume(self) -> None:
        # Pauses that wait end here.
        self._paused = True
        self.note_step()
        if self._engine.upkeep.is_sleeping:
            raise RequestError("the engine sleeps", "wake it up, which resumes too")
        self._held.clear()
        self._paused, self._engine.scheduler.admits = False, True

    def _end_pause(self, ticket: int) -> None:
        """End a pause as if it had not been; an engine that sleeps stays paused."""
        self._waiting.pop(ticket, None)
        self._held.discard(ticket)
        if not (self._waiting or self._engine.upkeep.is_sleeping):
            self._paused = bool(self._held)
            self._engine.scheduler.admits = not self._held

    def _answer(
        self,
        ticket: int,
        version: int = 0,
        error: SametokenError | None = None,
        *,
        adapted: bool = False,
    ) -> None:
        sleeps = self._engine.upkeep.is_sleeping
        self._send(Answer(ticket, version, error, self._paused, sleeps, adapted))

    def note_step(self) -> None:
        """Begin and answer pauses that need not wait any longer; call it after each step."""
        scheduler = self._engine.scheduler
        runs = scheduler.num_running or scheduler.num_swapped
        if self._waiting and (self._paused or not runs):
            self._paused = True
            begun, self._waiting = self._waiting, {}
            self._held |= begun.keys()
            for ticket, command in begun.items():
                self._carry_out(ticket, command)

    def _use(self, done: Done) -> None:
        command, result, version, adapted = done.order.command, done.result, 0, False
        is_wanted = done.order.ticket in self._wanted
        self._wanted.discard(done.order.ticket)
        if isinstance(result, NewWeights | NewAdapter) and not is_wanted:
            result.drop()
            result = None
        elif isinstance(result, NewAdapter):
            try:
                with used_or_dropped(result):
                    self._engine.upkeep.use_adapter(result)
                result, adapted = None, True
            except RequestError as error:
                result = error
        elif isinstance(result, NewWeights):
            assert isinstance(command, ChangeWeights | FinishUpdate | NameWeights)
            try:
                with used_or_dropped(result):
                    version, result = self._engine.upkeep.use_weights(result, command.version), None
            except WeightUpdateError as error:
                result = error
        self._answer(done.order.ticket, version, result, adapted=adapted)

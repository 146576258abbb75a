"""Pauses and new weights of the engine process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.engine.core import EngineCore
from sametoken.engine.weights import NewWeights
from sametoken.errors import SametokenError, WeightUpdateError
from sametoken.models.load.sent import source_of
from sametoken.serving.messages import Answer, ChangeWeights, Pause, Resume


@dataclass(frozen=True, slots=True)
class Loaded:
    """Within the engine process: the weights of a ``ChangeWeights``, or why there are none."""

    message: ChangeWeights
    weights: NewWeights | SametokenError


Command = Pause | Resume | ChangeWeights | Loaded


class Control:
    """Decides whether the engine may step, and changes its weights.

    New weights are read by a thread, beside the engine's steps, and written between two of them.

    Args:
        engine: the engine.
        post: brings a ``Loaded`` to ``handle``, from any thread.
        answer: sends an ``Answer``.
    """

    def __init__(
        self, engine: EngineCore, post: Callable[[Any], None], answer: Callable[[Any], None]
    ) -> None:
        self._engine = engine
        self._post = post
        self._answer = answer
        self._paused = False
        # Pauses that wait for running requests.
        self._waiting: list[int] = []

    @property
    def may_step(self) -> bool:
        """Whether there is work, and no pause."""
        return self._engine.has_unfinished and not self._paused

    def handle(self, message: Command) -> None:
        """Handle a command, and answer it now or later.

        Raises:
            EngineDeadError: a step in flight failed.
        """
        if isinstance(message, Pause):
            self._waiting.append(message.ticket)
            self._engine.scheduler.admits = False
            self._paused = not message.wait
            self.note_step()
        elif isinstance(message, Resume):
            self._paused = True
            self.note_step()
            self._paused, self._engine.scheduler.admits = False, True
            self._answer(Answer(message.ticket))
        elif isinstance(message, ChangeWeights):
            threading.Thread(target=self._load, args=(message,), daemon=True).start()
        else:
            self._use(message)

    def note_step(self) -> None:
        """Begin and answer pauses that need not wait any longer; call it after each step."""
        scheduler = self._engine.scheduler
        runs = scheduler.num_running or scheduler.num_swapped
        if self._waiting and (self._paused or not runs):
            self._paused = True
            for ticket in self._waiting:
                self._answer(Answer(ticket))
            self._waiting.clear()

    def _load(self, message: ChangeWeights) -> None:
        loaded: NewWeights | SametokenError
        try:
            source = source_of(Path(message.path))
            loaded = self._engine.weights.load(source, message.target)
        except SametokenError as error:
            loaded = error
        except Exception as error:
            loaded = WeightUpdateError(
                f"the new weights cannot be loaded: {error!r}", "see the log"
            )
        self._post(Loaded(message, loaded))

    def _use(self, loaded: Loaded) -> None:
        ticket, weights = loaded.message.ticket, loaded.weights
        if isinstance(weights, SametokenError):
            self._answer(Answer(ticket, error=weights))
            return
        try:
            version = self._engine.use_weights(weights, loaded.message.version)
        except WeightUpdateError as error:
            self._answer(Answer(ticket, error=error))
        else:
            self._answer(Answer(ticket, version))

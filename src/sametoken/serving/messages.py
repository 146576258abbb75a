"""Messages between the serving process and its engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sametoken.config import EngineConfig
from sametoken.engine.core import EngineCore
from sametoken.engine.summary import EngineSummary
from sametoken.errors import SametokenError
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.serving.stats import EngineLoad
from sametoken.types.request import (
    EngineRequest,
    RequestUpdate,
)

#: Makes an engine; pickled by name. The function is told in words of whatever takes long.
Build = Callable[[EngineConfig, Callable[[str], None]], EngineCore]


# To the engine


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message: what to build."""

    config: EngineConfig
    build: Build


@dataclass(frozen=True, slots=True)
class Submit:
    """The completions of one prompt: the engine takes all of them or none."""

    completions: tuple[EngineRequest, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Completions that are over, by id, and the tokens each keeps (``EngineCore.release``)."""

    num_kept: Mapping[str, int | None]
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine process to itself: a ``Submit`` whose grammar has been compiled, or cannot be."""

    submit: Submit
    error: SametokenError | None


# From the engine


@dataclass(frozen=True, slots=True)
class Announcement:
    """What takes long while the engine is built."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built. ``max_num_seqs`` of the limits is how many can run at once."""

    summary: EngineSummary
    limits: SchedulerLimits


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine took none of these completions."""

    request_ids: tuple[str, ...]
    error: SametokenError


@dataclass(frozen=True, slots=True)
class StepReport:
    """One turn of the engine's loop.

    Attributes:
        updates: what the step that was settled brought.
        load: how busy the engine is now.
        step_seconds: how long the step took; None if there was nothing to step.
    """

    updates: tuple[RequestUpdate, ...]
    load: EngineLoad
    step_seconds: float | None

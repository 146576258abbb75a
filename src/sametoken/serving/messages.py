"""Messages between the serving process and its engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sametoken.config import EngineConfig
from sametoken.errors import SametokenError
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.serving.stats import EngineLoad
from sametoken.types.engine_summary import EngineSummary
from sametoken.types.request import EngineRequest, RequestUpdate
from sametoken.types.weight_updates import MemoryHandle, Rendezvous

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore
    from sametoken.engine.shared_weights import SharedAdapter

#: Makes an engine; pickled by name. The function argument reports slow work in words.
Build = Callable[[EngineConfig, Callable[[str], None]], "EngineCore"]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Name, dtype (as in ``torch.bfloat16``, without "torch.") and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """Tensors that come joined in this update, until they are more than ``packed_bytes``.

    So do those of vLLM's trainers before 0.28; later ones say it as they join, once for all.
    """

    forms: tuple[TensorForm, ...]
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors in the memory of a trainer on this machine.

    Attributes:
        forms: what they are.
        handles: by device, of each tensor; or of one buffer, if ``sizes`` are given.
        sizes: bytes of each tensor in the buffer, which holds one after the other; (): no buffer.
    """

    forms: tuple[TensorForm, ...]
    handles: tuple[Mapping[str, MemoryHandle], ...]
    sizes: tuple[int, ...] = ()


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
    """Ended completions by id, and the tokens that each keeps (``EngineCore.release``)."""

    num_kept: Mapping[str, int | None]
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop stepping; with ``wait`` once the running requests have ended, else now."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """Step again."""


@dataclass(frozen=True, slots=True)
class CheckSleep:
    """Refuse a sleep of this level if the engine can never have it."""

    level: int


@dataclass(frozen=True, slots=True)
class FallAsleep:
    """Pause, with ``wait`` as there, and then give memory back; as ``EngineCore.sleep``."""

    level: int
    wait: bool


@dataclass(frozen=True, slots=True)
class WakeUp:
    """End a sleep, or that of some parts; once all is awake, the pause ends too."""

    tags: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Empty the prefix cache."""


@dataclass(frozen=True, slots=True)
class ChangeWeights:
    """Replace the weights by those of a directory; as ``LLM.update_weights``."""

    path: str
    version: int | None
    target: str


@dataclass(frozen=True, slots=True)
class JoinTrainer:
    """Join a trainer's process group, in place of the one before."""

    at: Rendezvous


@dataclass(frozen=True, slots=True)
class ComingAdapter:
    """An adapter whose tensors a trainer sends, with its name and PEFT's config."""

    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StartUpdate:
    """Begin an update of "model", "drafter" or an adapter; what was sent of another is dropped."""

    target: str | ComingAdapter


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Weights of the update: a directory with all of them, or tensors that the trainer sends.

    Or tensors in its memory, which are read when the update is finished.
    """

    weights: str | tuple[TensorForm, ...] | JoinedTensors | SharedTensors


@dataclass(frozen=True, slots=True)
class FinishUpdate:
    """Replace the weights by those that were taken since ``StartUpdate``."""

    version: int | None


@dataclass(frozen=True, slots=True)
class FinishAdapter:
    """Give a place to the adapter of this name, which was taken since ``StartUpdate``."""

    name: str


@dataclass(frozen=True, slots=True)
class NameWeights:
    """Give the weights, which stay, another version."""

    version: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read an adapter and give it a place; as ``LiveAdapters.load``.

    Attributes:
        name: by which requests choose it.
        given: its directory or hub id, or where it is in the serving process's memory.
    """

    name: str
    given: str | SharedAdapter


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """No further request may have the adapter of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """Within the engine process: a ``Submit`` whose grammar was compiled, or cannot be."""

    submit: Submit
    error: SametokenError | None


WeightCommand = (
    ChangeWeights
    | JoinTrainer
    | StartUpdate
    | TakeWeights
    | FinishUpdate
    | NameWeights
    | LoadAdapter
    | FinishAdapter
)
Command = (
    Pause
    | Resume
    | CheckSleep
    | FallAsleep
    | WakeUp
    | ForgetPrefixes
    | RemoveAdapter
    | WeightCommand
)


@dataclass(frozen=True, slots=True)
class Order:
    """A command, and the ticket of its ``Answer``."""

    ticket: int
    command: Command


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for an order's ``Answer`` any more.

    A pause ends as if it had not been, weights that are not in use yet are dropped, and all else
    goes on. Another ``Answer`` says how the engine is then.
    """

    ticket: int


# From the engine


@dataclass(frozen=True, slots=True)
class Announcement:
    """Slow work while the engine is built, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built; ``limits.max_num_seqs`` completions can run at once."""

    summary: EngineSummary
    limits: SchedulerLimits


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused these completions; ``num_submits`` is as in ``StepReport``."""

    request_ids: tuple[str, ...]
    error: SametokenError
    num_submits: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A command is done, or was refused.

    Attributes:
        ticket: the order's.
        version: of the weights, after they or it have changed; else 0.
        paused, sleeps: whether the engine is paused, and sleeps, now.
        adapted: whether a name has a new adapter.
    """

    ticket: int
    version: int = 0
    error: SametokenError | None = None
    paused: bool = False
    sleeps: bool = False
    adapted: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """One iteration of the engine loop.

    Attributes:
        updates: output of the processed step.
        load: the engine's load now.
        step_seconds: duration of the step; None if there was none.
        num_submits: how many ``Submit`` had been taken. An id that came with a later one is of
            another completion here, which was aborted.
        begun: completions whose first step this was.
    """

    updates: tuple[RequestUpdate, ...]
    load: EngineLoad
    step_seconds: float | None
    num_submits: int
    begun: tuple[str, ...] = ()

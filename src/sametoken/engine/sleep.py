"""Memory of an idle engine that is given back until it is needed again.

Addresses stay, as captured graphs and packed weights hold them: only what is behind them goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from sametoken.errors import InvariantError, RequestError, UnsupportedError, shown
from sametoken.io.pages import drop_pages
from sametoken.models.decoder import Decoder
from sametoken.models.in_place import tensors_of
from sametoken.runner.step import Step

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
#: Levels of sleep: what is given back at each.
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2


class Memory(Protocol):
    """Memory of an engine that can be given back."""

    def require_droppable(self) -> None:
        """Check that memory can be given back.

        Raises:
            UnsupportedError: it cannot.
        """
        ...

    def drop(self, *, weights: bool) -> None:
        """Give back KV, and with ``weights`` the target's; both then have any values.

        Raises:
            UnsupportedError: the system refuses; some of it may be gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Memory that stays.

    Attributes:
        why: of what it is a part.
    """

    why: str

    def require_droppable(self) -> None:
        """Refuse; see ``Memory``."""
        raise UnsupportedError(f"memory of {self.why} cannot be given back", "stop the engine")

    def drop(self, *, weights: bool) -> None:
        """Refuse; see ``Memory``."""
        self.require_droppable()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a CPU; the first access of a page brings it back, with zeros.

    Attributes:
        kv: caches of target and drafter.
        weights: the target's. Its smallest tensors, below a page, stay.
    """

    kv: Sequence[Tensor]
    weights: Sequence[Tensor]

    def require_droppable(self) -> None:
        """See ``Memory``."""

    def drop(self, *, weights: bool) -> None:
        """See ``Memory``."""
        for tensor in (*self.kv, *(self.weights if weights else ())):
            if tensor.is_contiguous():
                drop_pages(tensor.data_ptr(), tensor.nbytes)


@dataclass(slots=True)
class Sleep:
    """Which parts of an engine sleep, and whether its weights are lost.

    Attributes:
        memory: what is given back.
        asleep: parts that sleep, of ``TAGS``.
        lacks_weights: whether the target's weights were dropped, and no update came since.
    """

    memory: Memory
    asleep: set[str] = field(default_factory=set)
    lacks_weights: bool = False

    def begin(self, level: int) -> None:
        """Give back memory; a deeper level may follow.

        Raises:
            RequestError: there is no such level.
            UnsupportedError: this engine's memory cannot be given back.
        """
        if level not in (KEEP_WEIGHTS, DROP_WEIGHTS):
            raise RequestError(f"there is no sleep of level {shown(level)}", "use 1 or 2")
        self.memory.require_droppable()
        # Noted first: if the system refuses half-way, nothing runs on what is lost.
        self.asleep = set(TAGS)
        self.lacks_weights = self.lacks_weights or level == DROP_WEIGHTS
        self.memory.drop(weights=level == DROP_WEIGHTS)

    def end(self, tags: Iterable[str] | None) -> None:
        """Wake parts up; None: all of them.

        Raises:
            RequestError: there is no such part, or all would be awake without weights.
        """
        waking = set(TAGS if tags is None else tags)
        if unknown := waking - set(TAGS):
            raise RequestError(f"no part is called {shown(min(unknown))}", f"use {TAGS}")
        if self.lacks_weights and not self.asleep - waking:
            raise RequestError(
                "the weights were dropped by a sleep of level 2", "update the weights first"
            )
        self.asleep -= waking

    def require_awake(self) -> None:
        """Check that steps may run.

        Raises:
            InvariantError: some part sleeps.
        """
        if self.asleep:
            raise InvariantError(f"a step while {min(self.asleep)} sleeps")


def memory_of(step: Step, *, shared: bool) -> Memory:
    """The memory of an engine that was built.

    Args:
        step: its functions, with model and caches.
        shared: whether several ranks share the model.
    """
    if shared:
        return FixedMemory("several ranks")
    if step.sequences.device.type != "cpu":
        return FixedMemory("a GPU")
    caches = (step.kv, *step.drafter.kv_caches)
    kv = tuple(tensor for cache in caches for tensor in (*cache.blocks, *cache.slots))
    assert isinstance(step.model, Decoder)
    return HostMemory(kv, tensors_of(step.model))

"""Memory of an idle engine that is given back until it is needed again.

On a CPU addresses stay, as packed weights hold them: only what is behind them goes. On a GPU
captured graphs alone hold addresses, so the graphs go too, and are captured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sametoken.engine.user_inputs import require_level
from sametoken.errors import (
    InvariantError,
    RequestError,
    UnsupportedError,
    WeightUpdateError,
    shown,
)
from sametoken.io.pages import drop_pages
from sametoken.models.decoder import Decoder
from sametoken.models.in_place import tensors_of
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.runner.graphs import StepGraphs
from sametoken.runner.runner import StepRunner

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
#: The level of sleep at which weights go too.
DROP_WEIGHTS = 2


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

    def restore(self, tags: Iterable[str]) -> None:
        """Have memory for parts again: KV of zeros, weights of any values.

        Raises:
            RequestError: there is no room for it; some of it may be there.
        """
        ...

    def make_ready(self) -> None:
        """Prepare steps, once all memory is there and the weights have their values.

        Raises:
            RequestError: there is no room for the graphs.
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

    def restore(self, tags: Iterable[str]) -> None:
        """Nothing is gone."""

    def make_ready(self) -> None:
        """Nothing is gone."""


@dataclass(frozen=True, slots=True)
class CPUMemory:
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

    def restore(self, tags: Iterable[str]) -> None:
        """Nothing to do: pages come as they are used."""

    def make_ready(self) -> None:
        """Nothing to do: there are no graphs."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU: storages shrink to nothing, and come back at other addresses.

    Tensors follow their storages; captured graphs do not, and are dropped with the memory.

    Attributes:
        kv, weights: storages with their sizes in bytes, as ``whole_storages`` finds them.
        graphs: the captured steps; None if steps are launched one kernel at a time.
    """

    kv: Sequence[tuple[torch.UntypedStorage, int]]
    weights: Sequence[tuple[torch.UntypedStorage, int]]
    graphs: StepGraphs | None

    def require_droppable(self) -> None:
        """See ``Memory``."""

    def drop(self, *, weights: bool) -> None:
        """See ``Memory``."""
        # Copies of an update may still run: nobody waits for them.
        torch.cuda.synchronize()
        if self.graphs is not None:
            self.graphs.release()
        for storage, _ in (*self.kv, *(self.weights if weights else ())):
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self, tags: Iterable[str]) -> None:
        """See ``Memory``; what is there stays as it is."""
        for tag in tags:
            for storage, num_bytes in self.kv if tag == KV_CACHE else self.weights:
                if storage.nbytes() == num_bytes:
                    continue
                with _out_of_memory_explained():
                    storage.resize_(num_bytes)
                if tag == KV_CACHE:
                    storage.fill_(0)  # type: ignore[attr-defined]

    def make_ready(self) -> None:
        """See ``Memory``."""
        if self.graphs is not None:
            with _out_of_memory_explained():
                self.graphs.capture_all()


def _out_of_memory_explained() -> AbstractContextManager[None]:
    """Turn an out-of-memory error into a ``RequestError``."""
    return out_of_memory_as(
        RequestError,
        "the device has no room to wake up",
        "free memory that other processes took meanwhile, and wake up again",
    )


def whole_storages(tensors: Iterable[Tensor]) -> tuple[tuple[torch.UntypedStorage, int], ...]:
    """The storages that hold these tensors and nothing else, with their sizes in bytes."""
    storages, held = {}, Counter[int]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        held[storage._cdata] += tensor.nbytes
    return tuple(
        (storage, storage.nbytes())
        for at, storage in storages.items()
        if held[at] >= storage.nbytes() and storage.resizable()
    )


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

    def require_possible(self, level: int) -> None:
        """Refuse what ``begin`` refuses, before anything else is done for a sleep.

        Raises:
            RequestError: there is no such level.
            UnsupportedError: this engine's memory cannot be given back.
        """
        require_level(level)
        self.memory.require_droppable()

    def begin(self, level: int) -> None:
        """Give back memory; a deeper level may follow.

        Raises:
            RequestError: there is no such level.
            UnsupportedError: this engine's memory cannot be given back.
        """
        self.require_possible(level)
        # Noted first: if the system refuses half-way, nothing runs on what is lost.
        self.asleep = set(TAGS)
        self.lacks_weights = self.lacks_weights or level == DROP_WEIGHTS
        self.memory.drop(weights=level == DROP_WEIGHTS)

    def end(self, tags: Iterable[str] | None) -> None:
        """Wake parts up; None: all of them.

        Raises:
            RequestError: there is no such part, no room for it, or all would be awake without
                weights.
        """
        waking = set(TAGS if tags is None else tags)
        if unknown := waking - set(TAGS):
            raise RequestError(f"no part is called {shown(min(unknown))}", f"use {TAGS}")
        if self.lacks_weights and not self.asleep - waking:
            raise RequestError(
                "the weights were dropped by a sleep of level 2", "update the weights first"
            )
        if not self.asleep:
            return
        # Woken last: if there is no room, it goes on sleeping.
        self.memory.restore(sorted(self.asleep & waking))
        if not self.asleep - waking:
            self.memory.make_ready()
        self.asleep -= waking

    def begin_update(self) -> None:
        """Have memory for weights that were dropped, as new ones are to be written.

        Raises:
            WeightUpdateError: there is no room for it.
        """
        if self.lacks_weights:
            try:
                self.memory.restore((WEIGHTS,))
            except RequestError as error:
                raise WeightUpdateError(error.cause, error.remedy) from error

    def require_awake(self) -> None:
        """Check that steps may run.

        Raises:
            InvariantError: some part sleeps.
        """
        if self.asleep:
            raise InvariantError(f"a step while {min(self.asleep)} sleeps")


def memory_of(runner: StepRunner, target: Decoder, *, shared: bool) -> Memory:
    """The memory of an engine that was built.

    Args:
        runner: runs its steps; has caches and graphs.
        target: the model that it runs.
        shared: whether several ranks share the model.
    """
    if shared:
        return FixedMemory("several ranks")
    step, launcher = runner.step, runner.launcher
    caches = (step.kv, *step.drafter.kv_caches)
    kv = tuple(tensor for cache in caches for tensor in (*cache.blocks, *cache.slots))
    weights = tensors_of(target)
    if step.sequences.device.type == "cpu":
        return CPUMemory(kv, weights)
    graphs = launcher if isinstance(launcher, StepGraphs) else None
    return DeviceMemory(whole_storages(kv), whole_storages(weights), graphs)

"""New weights for a model that several ranks share: all of them take theirs, or none does.

Rank 0 puts the tensors into host memory, once, and tells where. Every rank loads its share of them
beside the weights in use, and says whether it fits. If all fit, rank 0 tells them to write, in the
order of the plans: every rank changes between the same two steps.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sametoken.distributed.host_memory import HostMemory, mapped, places
from sametoken.distributed.ranks import Ranks
from sametoken.engine.weights import NewWeights, Weights, update_errors
from sametoken.errors import SametokenError, WeightUpdateError
from sametoken.models.in_place import Replacement
from sametoken.models.load.adapter import AdapterConfig, StoredAdapter
from sametoken.models.load.sent import SentTensors
from sametoken.models.load.sources import TensorSource
from sametoken.ops.flat_memory import flat_memory
from sametoken.types.units import in_units
from sametoken.types.weight_updates import MODEL

# To a follower, in the order of the plans.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor begins in memory, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Load this rank's share of tensors in rank 0's memory, and answer with ``ShareLoaded``.

    Attributes:
        number: of the update, as an interrupted one leaves answers behind.
        path, num_bytes: of the memory.
        places: of the tensors in it.
        target: as in ``Weights.load``.
    """

    number: int
    path: str
    num_bytes: int
    places: tuple[Place, ...]
    target: str = MODEL

    def source(self) -> SentTensors:
        """The tensors."""
        memory = mapped(self.path, self.num_bytes)
        return SentTensors(
            (
                one.name,
                memory[one.first : one.first + one.num_bytes].view(one.dtype).view(one.shape),
            )
            for one in self.places
        )


@dataclass(frozen=True, slots=True)
class SharedAdapter:
    """An adapter in another process's memory.

    Attributes:
        location, config: as in ``StoredAdapter``.
        memory: its tensors.
    """

    location: str
    config: AdapterConfig
    memory: LoadShare

    def stored(self) -> StoredAdapter:
        """The adapter, while that process keeps its memory."""
        return StoredAdapter(self.location, self.config, self.memory.source())


@dataclass(frozen=True, slots=True)
class LoadFactors:
    """Read this rank's share of an adapter, and answer with ``ShareLoaded``.

    Attributes:
        number: of the update, as in ``LoadShare``.
        adapter: its number.
        shared: the adapter in rank 0's memory.
    """

    number: int
    adapter: int
    shared: SharedAdapter


@dataclass(frozen=True, slots=True)
class UseShare:
    """Write what was loaded over the weights in use, or drop it."""

    write: bool


@dataclass(frozen=True, slots=True)
class UseFactors:
    """Write the adapter that was loaded to a place."""

    place: int


# From a follower.


@dataclass(frozen=True, slots=True)
class ShareLoaded:
    """What loading came to; no error if the share fits. ``number`` is that of the update."""

    number: int
    error: SametokenError | None


#: Reads this rank's share of an adapter, which has a number; returns what writes it to a place.
LoadAdapter = Callable[[StoredAdapter, int], Callable[[int], None]]

#: Of the updates that this process leads.
_numbers = itertools.count()


@contextmanager
def agreed(ranks: Ranks, message: Callable[[int], LoadShare | LoadFactors]) -> Iterator[None]:
    """A block that loads rank 0's share while the others load theirs.

    Args:
        ranks: all of them. If one refuses, the block included, none keeps its share.
        message: tells the others what to load, with the update's number.

    Raises:
        SametokenError: the refusal of another rank.
    """
    number = next(_numbers)
    ranks.tell(message(number))
    try:
        try:
            yield
        finally:
            answers = ranks.collect(ShareLoaded, lambda one: one.number == number)
            refusals = [answer.error for answer in answers if answer.error is not None]
            del answers
        if refusals:
            # Held by no frame of its own traceback, which would keep the engine alive.
            raise refusals.pop(0)
    except BaseException:
        ranks.tell(UseShare(write=False))
        raise


@dataclass(frozen=True, slots=True)
class LeadingWeights:
    """``Weights`` of rank 0, which leads the others. One update at a time.

    Attributes:
        own: of this rank.
        ranks: all of them.
    """

    own: Weights
    ranks: Ranks

    def require_target(self, target: str) -> int:
        """See ``Weights``; each rank has as much as this one, at most."""
        return self.ranks.parallel.size * self.own.require_target(target)

    def load(self, source: TensorSource, target: str) -> NewWeights:
        """See ``Weights``; no rank uses any of it yet."""
        self.own.require_target(target)
        with update_errors():
            _kept, memory = _in_memory(source)
        with agreed(self.ranks, lambda number: replace(memory, number=number, target=target)):
            new = self.own.load(source, target)
        return replace(new, replacement=SharedReplacement(new.replacement.pairs, self.ranks))


@dataclass(frozen=True, slots=True)
class SharedReplacement(Replacement):
    """That of rank 0, whose ``write`` and ``drop`` are those of all ranks."""

    ranks: Ranks

    def write(self) -> None:
        """See ``Replacement``; between two plans."""
        self.ranks.tell(UseShare(write=True))
        Replacement.write(self)

    def drop(self) -> None:
        """See ``Replacement``."""
        self.ranks.tell(UseShare(write=False))


class FollowingWeights:
    """A follower's weights and adapters. They are loaded by a thread, beside the plans.

    Args:
        own: weights of this rank.
        load_factors: see ``LoadAdapter``; None: rank 0 sends no adapter.
        device: the current one of this thread.
        send: answers rank 0.
    """

    def __init__(
        self,
        own: Weights,
        load_factors: LoadAdapter | None,
        device: torch.device,
        send: Callable[[Any], None],
    ) -> None:
        self._own, self._load_factors = own, load_factors
        self._gpu = torch.cuda.current_device() if device.type == "cuda" else None
        self._send = send
        # The update that is loaded, until it is ended, and what writes it.
        self._number: int | None = None
        self._loaded: NewWeights | Callable[[int], None] | None = None
        self._lock = threading.Lock()
        # For one copy of the weights: an update may begin while an interrupted one is loaded.
        self._room = threading.Lock()

    def begin(
        self, message: LoadShare | LoadFactors | UseShare | UseFactors
    ) -> Callable[[], None] | None:
        """Begin what rank 0 says, as soon as it comes: plans before it may wait for rank 0.

        Returns:
            What is to be done once those plans have been run.
        """
        with self._lock:
            loaded, self._loaded, self._number = self._loaded, None, None
            if isinstance(message, LoadShare | LoadFactors):
                self._number = message.number
        if isinstance(message, LoadShare | LoadFactors):
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        elif isinstance(message, UseFactors) and callable(loaded):
            return partial(loaded, message.place)
        elif isinstance(message, UseShare) and message.write and isinstance(loaded, NewWeights):
            return loaded.replacement.write
        return None

    def _answer(self, message: LoadShare | LoadFactors) -> None:
        # A thread begins on the first GPU.
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        with self._room:
            self._send(ShareLoaded(message.number, self._load(message)))

    def _load(self, message: LoadShare | LoadFactors) -> SametokenError | None:
        # A function of its own, so that the thread keeps no weights that nobody wants any more.
        try:
            loaded: NewWeights | Callable[[int], None]
            if isinstance(message, LoadFactors):
                assert self._load_factors is not None
                loaded = self._load_factors(message.shared.stored(), message.adapter)
            else:
                loaded = self._own.load(message.source(), message.target)
            with self._lock:
                if self._number == message.number:
                    self._loaded = loaded
        except SametokenError as refusal:
            return refusal
        except Exception as failure:
            return WeightUpdateError(
                f"a rank cannot load the new weights: {failure!r}", "see its log"
            )
        return None


def adapter_in_memory(stored: StoredAdapter) -> tuple[HostMemory, SharedAdapter]:
    """A copy that other processes can read while the memory is kept; errors as an update's."""
    memory, share = _in_memory(stored.tensors)
    return memory, SharedAdapter(stored.location, stored.config, share)


def _in_memory(source: TensorSource) -> tuple[HostMemory, LoadShare]:
    """A copy that all ranks can read, and where it is; the update has no number yet.

    Raises:
        WeightUpdateError: there is no memory for it.
        CheckpointError, UnsupportedError: a tensor cannot be read.
    """
    names = list(source.names())
    forms = [(name, source.stored_dtype(name), source.shape(name)) for name in names]
    starts, end = places(math.prod(shape) * dtype.itemsize for _, dtype, shape in forms)
    try:
        memory = HostMemory(end)
    except OSError as error:
        raise WeightUpdateError(
            f"no host memory for {in_units(end)}, a copy that all ranks read ({error.strerror})",
            "leave room for it",
        ) from error
    found = tuple(Place(*form, first) for form, first in zip(forms, starts, strict=True))
    for place in found:
        first = place.first
        for chunk in source.stored_chunks(place.name):
            rows = flat_memory(chunk.contiguous())
            memory.bytes[first : first + len(rows)].copy_(rows)
            first += len(rows)
    return memory, LoadShare(0, memory.path, len(memory.bytes), found)

"""LoRA adapters that come and go while an engine runs, on every rank of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar, Protocol

from sametoken.distributed.ranks import Ranks
from sametoken.engine.modes import without_modes
from sametoken.engine.shared_weights import (
    LoadFactors,
    UseFactors,
    UseShare,
    adapter_in_memory,
    agreed,
)
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    RequestError,
    UnsupportedError,
    WeightUpdateError,
)
from sametoken.models.adapted import AdaptedModel
from sametoken.models.load.adapter import StoredAdapter, open_adapter
from sametoken.models.names import resolve_adapter
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.types.lora_modules import no_adapter


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter that fits, read and not in use yet.

    Attributes:
        name: of the adapter; later requests of this name have it.
        write: writes it to a place, between two steps.
        drop: forgets it; it will not be written.
    """

    name: str
    write: Callable[[int], None]
    drop: Callable[[], None]


class LiveAdapters(Protocol):
    """The adapters of a running engine, by name. Each has a number; none is given twice."""

    @property
    def come(self) -> bool:
        """Whether others than those of the start may come."""
        ...

    @property
    def count(self) -> int:
        """How many there may be at once."""
        ...

    def number(self, name: str) -> int:
        """The number that a request of this name has from now on.

        Raises:
            RequestError: there is none.
        """
        ...

    def require_room(self) -> int:
        """The most bytes that a trainer may send of an adapter.

        Raises:
            RequestError: none can come here.
        """
        ...

    def load(self, name: str, given: str | StoredAdapter) -> NewAdapter:
        """Read an adapter, beside the steps; nothing that runs is changed.

        Args:
            name: of the adapter, which may be that of another one.
            given: its directory or hub id, or what a trainer has sent.

        Raises:
            RequestError: it cannot be read, does not fit the model, or none can come here.
        """
        ...

    def place(self, name: str, in_use: Collection[int]) -> int | None:
        """Where an adapter of this name may be written; None if there is no room.

        Args:
            name: of the adapter, which may be that of another one.
            in_use: the numbers that unfinished requests have.
        """
        ...

    def remove(self, name: str) -> None:
        """No further request may have it; unfinished ones keep it until they end."""
        ...


@dataclass(frozen=True, slots=True)
class NoLiveAdapters:
    """An engine without room for adapters."""

    come: ClassVar[bool] = False
    count: ClassVar[int] = 0

    def number(self, name: str) -> int:
        """Refuse; see ``LiveAdapters``."""
        raise no_adapter(name, ())

    def require_room(self) -> int:
        """Refuse; see ``LiveAdapters``."""
        raise _none_comes()

    def load(self, name: str, given: str | StoredAdapter) -> NewAdapter:
        """Refuse; see ``LiveAdapters``."""
        raise _none_comes()

    def place(self, name: str, in_use: Collection[int]) -> int | None:
        """None; see ``LiveAdapters``."""
        return None

    def remove(self, name: str) -> None:
        """None is there."""


def _none_comes() -> RequestError:
    return RequestError("no adapter can come to this engine", "start with enable_lora")


class AdapterPlaces:
    """``LiveAdapters`` of a model with room for them.

    Args:
        model: of this rank, which leads the others.
        ranks: all of them.
        names: of the adapters that the model has, whose numbers begin with 1.
        come: see ``LiveAdapters``.
    """

    def __init__(
        self, model: AdaptedModel, ranks: Ranks, names: Sequence[str], *, come: bool
    ) -> None:
        self.come = come
        self._model, self._ranks = model, ranks
        self._numbers = dict(zip(names, count(1)))
        self._next = count(1 + len(names))

    @property
    def count(self) -> int:
        """See ``LiveAdapters``."""
        return self._model.room.count

    def number(self, name: str) -> int:
        """See ``LiveAdapters``."""
        number = self._numbers.get(name)
        if number is None:
            raise no_adapter(name, self._numbers)
        return number

    def require_room(self) -> int:
        """See ``LiveAdapters``."""
        if not self.come:
            raise _none_comes()
        return self._model.most_bytes

    @without_modes()
    def load(self, name: str, given: str | StoredAdapter) -> NewAdapter:
        """See ``LiveAdapters``; every rank takes its share of what this one read."""
        self.require_room()
        number = next(self._next)
        with adapter_errors():
            write = self._loaded(_opened(given) if isinstance(given, str) else given, number)

        def write_all(place: int) -> None:
            self._ranks.tell(UseFactors(place))
            write(place)
            self._numbers[name] = number

        return NewAdapter(name, write_all, lambda: self._ranks.tell(UseShare(write=False)))

    def _loaded(self, stored: StoredAdapter, number: int) -> Callable[[int], None]:
        if self._ranks.parallel.size == 1:
            return load_factors(self._model, stored, number)
        _kept, shared = adapter_in_memory(stored)
        with agreed(self._ranks, lambda update: LoadFactors(update, number, shared)):
            return load_factors(self._model, shared.stored(), number)

    def place(self, name: str, in_use: Collection[int]) -> int | None:
        """See ``LiveAdapters``."""
        kept = {*in_use, *(number for one, number in self._numbers.items() if one != name)}
        taken = {place for number, place in self._model.places.items() if number in kept}
        return next((one for one in range(1, self.count + 1) if one not in taken), None)

    def remove(self, name: str) -> None:
        """See ``LiveAdapters``."""
        self._numbers.pop(name, None)


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Errors of reading an adapter, as those of the request that brings it."""
    try:
        yield
    except (CheckpointError, ConfigError, UnsupportedError, WeightUpdateError) as error:
        raise RequestError(error.cause, error.remedy, param="lora_path") from error


def load_factors(model: AdaptedModel, stored: StoredAdapter, number: int) -> Callable[[int], None]:
    """Read this rank's share of an adapter; what is returned writes it to a place.

    Raises:
        CheckpointError, UnsupportedError: as ``StoredAdapter.read`` and ``AdaptedModel.prepare``.
        RequestError: there is no memory for it.
    """
    with out_of_memory_as(RequestError, "no memory for an adapter", "use one of a smaller rank"):
        return model.prepare(stored.read(), number)


def _opened(path: str) -> StoredAdapter:
    return open_adapter(Path(resolve_adapter(path, lambda text: None)))

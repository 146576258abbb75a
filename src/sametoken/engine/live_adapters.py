"""LoRA adapters that come and go while an engine runs, on every rank of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from sametoken.distributed.ranks import Ranks
from sametoken.engine.shared_weights import LoadFactors, UseFactors, UseShare, agreed
from sametoken.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from sametoken.models.adapted import AdaptedModel
from sametoken.models.load.adapter import read_adapter
from sametoken.models.names import resolve_adapter
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.types.lora_modules import NO_ADAPTER


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter that fits, read and not in use yet.

    Attributes:
        write: writes it to a place, between two steps.
        drop: forgets it; it will not be written.
        replaces: the number of an adapter that goes as this one comes.
    """

    write: Callable[[int], None]
    drop: Callable[[], None]
    replaces: int = NO_ADAPTER


class LiveAdapters(Protocol):
    """The adapters of a running engine, by numbers of which none is given twice."""

    @property
    def come(self) -> bool:
        """Whether others than those of the start may come."""
        ...

    @property
    def count(self) -> int:
        """How many there may be at once."""
        ...

    def require(self, number: int) -> None:
        """Check that a request may have an adapter; ``NO_ADAPTER`` is none.

        Raises:
            RequestError: it is not there.
        """
        ...

    def load(self, number: int, path: str, replaces: int = NO_ADAPTER) -> NewAdapter:
        """Read an adapter, beside the steps; nothing that runs is changed.

        Args:
            number: of the adapter.
            path: its directory or hub id.
            replaces: as in ``NewAdapter``.

        Raises:
            RequestError: it cannot be read, does not fit the model, or none can come here.
        """
        ...

    def places(self, replaces: int, in_use: Collection[int]) -> list[int]:
        """Where one more may be written; over what requests may still choose last.

        Args:
            replaces: as in ``NewAdapter``.
            in_use: the numbers that unfinished requests have.
        """
        ...

    def replaced(self, number: int) -> None:
        """Another one came in its place; requests that chose it before have it, if it is there."""
        ...

    def remove(self, number: int) -> None:
        """No further request may have it; unfinished ones keep it until they end."""
        ...


@dataclass(frozen=True, slots=True)
class NoLiveAdapters:
    """An engine without room for adapters."""

    come: ClassVar[bool] = False
    count: ClassVar[int] = 0

    def require(self, number: int) -> None:
        """See ``LiveAdapters``."""
        if number != NO_ADAPTER:
            raise RequestError(f"adapter {number} is not there", "start with lora_modules")

    def load(self, number: int, path: str, replaces: int = NO_ADAPTER) -> NewAdapter:
        """Refuse; see ``LiveAdapters``."""
        raise _none_comes()

    def places(self, replaces: int, in_use: Collection[int]) -> list[int]:
        """None; see ``LiveAdapters``."""
        return []

    def replaced(self, number: int) -> None:
        """None is there."""

    def remove(self, number: int) -> None:
        """None is there."""


def _none_comes() -> RequestError:
    return RequestError("no adapter can come to this engine", "start with enable_lora")


@dataclass(frozen=True, slots=True)
class AdapterPlaces:
    """``LiveAdapters`` of a model with room for them.

    Attributes:
        model: of this rank, which leads the others.
        ranks: all of them.
        come: see ``LiveAdapters``.
    """

    model: AdaptedModel
    ranks: Ranks
    come: bool
    # The oldest first.
    _replaced: list[int] = field(default_factory=list)
    _removed: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """See ``LiveAdapters``."""
        return self.model.room.count

    def require(self, number: int) -> None:
        """See ``LiveAdapters``."""
        there = number in self.model.places and number not in self._removed
        if number != NO_ADAPTER and not there:
            raise RequestError(
                "the adapter was removed, or another one came in its place",
                "choose one that is there; with a larger max_loras replaced ones stay longer",
            )

    def load(self, number: int, path: str, replaces: int = NO_ADAPTER) -> NewAdapter:
        """See ``LiveAdapters``; every rank reads its share."""
        if not self.come:
            raise _none_comes()
        try:
            found = str(resolve_adapter(path, lambda text: None))
            with agreed(self.ranks, lambda update: LoadFactors(update, number, found)):
                write = load_factors(self.model, number, found)
        except (CheckpointError, ConfigError, UnsupportedError) as error:
            raise RequestError(error.cause, error.remedy, param="lora_path") from error

        def write_all(place: int) -> None:
            self.ranks.tell(UseFactors(place))
            write(place)

        return NewAdapter(write_all, lambda: self.ranks.tell(UseShare(write=False)), replaces)

    def places(self, replaces: int, in_use: Collection[int]) -> list[int]:
        """See ``LiveAdapters``."""
        held = self.model.places
        free = set(range(1, self.count + 1)) - set(held.values())
        going = (*self._removed, *self._replaced, replaces)
        return sorted(free) + [held[one] for one in going if one in held and one not in in_use]

    def replaced(self, number: int) -> None:
        """See ``LiveAdapters``."""
        self._forget()
        self._replaced.append(number)

    def remove(self, number: int) -> None:
        """See ``LiveAdapters``."""
        self._forget()
        self._removed.append(number)

    def _forget(self) -> None:
        """Forget what was overwritten."""
        for numbers in (self._replaced, self._removed):
            numbers[:] = [one for one in numbers if one in self.model.places]


def load_factors(model: AdaptedModel, number: int, path: str) -> Callable[[int], None]:
    """Read this rank's share of an adapter; what is returned writes it to a place.

    Raises:
        CheckpointError, UnsupportedError: as ``read_adapter`` and ``AdaptedModel.prepare``.
        RequestError: there is no memory for it.
    """
    with out_of_memory_as(RequestError, "no memory for an adapter", "use one of a smaller rank"):
        return model.prepare(read_adapter(Path(path)), number)

"""LoRA adapters beside the linears of a checkpoint that is being read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load.share import Part, Split
from sametoken.ops.model.low_rank import Factors, RowAdapters
from sametoken.ops.weight import Weight

if TYPE_CHECKING:
    from sametoken.models.load.weights import WeightReader

#: Where a decoder's layers begin in the names of modules.
_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank updates of a model's linear modules.

    Attributes:
        name: by which requests choose it.
        location: its directory, for messages.
        modules: by name from "layers." on, e.g. "layers.0.self_attn.q_proj"; on the host.
    """

    name: str
    location: str
    modules: Mapping[str, Factors]


class Adapters(Protocol):
    """What stands beside the weights that are read."""

    @property
    def rows(self) -> RowAdapters | None:
        """The adapter of each row of a pass; None: no row has one."""
        ...

    def beside(
        self, weight: Weight, reader: WeightReader, in_features: int, parts: Sequence[Part]
    ) -> Weight:
        """A linear's weight with what adapters add to its parts, if any do.

        Args:
            weight: this rank's share.
            reader: whose ranks divide the parts.
            in_features: columns of each whole part.
            parts: of the linear, named by their modules.

        Raises:
            CheckpointError: an adapter's factors have other shapes than the linear.
        """
        ...

    def require_all_used(self) -> None:
        """Refuse adapters of modules that no linear of the model is.

        Raises:
            UnsupportedError: the model would silently differ from the one that was trained.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoAdapters:
    """Nothing stands beside weights."""

    rows: ClassVar[None] = None

    def beside(
        self, weight: Weight, reader: WeightReader, in_features: int, parts: Sequence[Part]
    ) -> Weight:
        """The weight itself."""
        return weight

    def require_all_used(self) -> None:
        """There are none."""


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """Adapters whose factors stand beside the linears that they name.

    Attributes:
        adapters: in the order of their numbers, from 1 on.
        rows: the adapter of each row of a pass.
    """

    adapters: tuple[Adapter, ...]
    rows: RowAdapters = field(default_factory=RowAdapters)
    _used: set[tuple[int, str]] = field(default_factory=set)

    def beside(
        self, weight: Weight, reader: WeightReader, in_features: int, parts: Sequence[Part]
    ) -> Weight:
        """See ``Adapters``."""
        found = [
            [self._factors(number, part, in_features, reader) for part in parts]
            for number in range(len(self.adapters))
        ]
        if not any(one for own in found for one in own):
            return weight
        sizes = [reader.share(part.of_rows(), (1,)).num_rows for part in parts]
        return reader.kernels.adapt(weight, found, sizes, self.rows)

    def _factors(
        self, number: int, part: Part, in_features: int, reader: WeightReader
    ) -> Factors | None:
        """This rank's share of what an adapter adds to a part; None: nothing."""
        _, layers, name = part.name.partition(_LAYERS)
        adapter, module = self.adapters[number], layers + name
        own = adapter.modules.get(module)
        if own is None:
            return None
        self._used.add((number, module))
        found = own.up.shape[0], own.down.shape[1]
        if found != (part.rows, in_features):
            raise CheckpointError(
                f"adapter {adapter.location} is for a {module} of {found[0]} x {found[1]}, the "
                f"model's has {part.rows} x {in_features}",
                "check that adapter and model belong together",
            )
        # Ranks that divide a linear's inputs divide the first factor, else the second.
        inputs = part.split if part.split is Split.COLUMNS else Split.WHOLE
        down = reader.share(Part(module, own.rank, split=inputs), (in_features,))
        up = reader.share(part.of_rows(), (own.rank,))
        place = reader.dtype, reader.device
        return Factors(down.of(own.down, *place), up.of(own.up, *place), own.scale)

    def require_all_used(self) -> None:
        """See ``Adapters``."""
        for number, adapter in enumerate(self.adapters):
            unused = sorted(m for m in adapter.modules if (number, m) not in self._used)
            if unused:
                raise UnsupportedError(
                    f"adapter {adapter.location} changes {len(unused)} modules that are no linears "
                    f"of this model: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}",
                    "train an adapter of the attention's and the MLP's projections alone, or merge "
                    "it into the checkpoint",
                )


NO_ADAPTERS: Adapters = NoAdapters()

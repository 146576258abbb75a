"""A model whose rows may have LoRA adapters: it shares the weights of the one whose rows have none.

Both run side by side: a step whose requests have no adapters is one of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.linear import Linear, Projection, RowParallelLinear
from sametoken.layers.norm import RMSNorm, RoundingNorm
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.share import Part, Split, share_of
from sametoken.models.decoder import Decoder, DecoderLayer
from sametoken.ops.model.low_rank import Factors, Room, RowAdapters, Update

#: Where a decoder's layers begin in the names of modules.
_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank updates of a model's linear modules.

    Attributes:
        location: its directory, for messages.
        modules: by name from "layers." on, e.g. "layers.0.self_attn.q_proj"; on the host.
    """

    location: str
    modules: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(one.rank for one in self.modules.values())


@dataclass(frozen=True, slots=True)
class _AdaptedLinear:
    """A linear of the model.

    Attributes:
        modules: the names of its parts, as adapters have them.
        parts: how ranks divide them.
        in_features: columns of each whole part.
        update: what adapters add to it.
    """

    modules: tuple[str, ...]
    parts: tuple[Part, ...]
    in_features: int
    update: Update


class AdaptedModel:
    """A decoder beside whose linears adapters have places, numbered from 1 on.

    Args:
        target: the model whose rows have none.
        parallel: the ranks that divide it.
        room: see below.
        modules: those that may be adapted; None: all linears of its layers.

    Attributes:
        decoder: the model whose rows may have adapters.
        rows: the place of each row's adapter in a pass.
        places: of the adapters that are there, by their numbers.
        room: of every place.
    """

    def __init__(
        self,
        target: Decoder,
        parallel: TensorParallel,
        room: Room,
        modules: frozenset[str] | None = None,
    ) -> None:
        self.rows, self.places = RowAdapters(), dict[int, int]()
        self._kernels, self._parallel, self.room = target.kernels, parallel, room
        self._wanted, self._linears = modules, list[_AdaptedLinear]()
        self.decoder = copy(target)
        self.decoder.layers = tuple(self._adapted(layer) for layer in target.layers)

    @property
    def most_bytes(self) -> int:
        """Of an adapter's factors in the widest dtype, float64."""
        sizes = (one.in_features + part.rows for one in self._linears for part in one.parts)
        return sum(sizes) * self.room.rank * 8

    def prepare(self, adapter: Adapter, number: int) -> Callable[[int], None]:
        """Bring an adapter to the device; what is returned writes it, between steps, to a place.

        Args:
            adapter: the adapter.
            number: by which requests have it; no other one ever has it.

        Returns:
            A function of the place, which no unfinished request's adapter may have.

        Raises:
            CheckpointError: its factors have other shapes than the model's linears.
            UnsupportedError: a module is no linear of the model, or there is no room for its rank.
        """
        self._require_known(adapter)
        if adapter.rank > self.room.rank:
            raise UnsupportedError(
                f"adapter {adapter.location} has rank {adapter.rank}, and there is room for "
                f"{self.room.rank}",
                "start with a larger max_lora_rank",
            )
        writes = [
            one.update.prepare([self._factors(adapter, one, i) for i in range(len(one.parts))])
            for one in self._linears
        ]

        def write(place: int) -> None:
            for each in writes:
                each(place)
            for other in [one for one, at in self.places.items() if at == place]:
                del self.places[other]
            self.places[number] = place

        return write

    def _require_known(self, adapter: Adapter) -> None:
        """Refuse what the model would leave out, and so differ from the one that was trained."""
        known = {module for one in self._linears for module in one.modules}
        unused = sorted(adapter.modules.keys() - known)
        if unused:
            raise UnsupportedError(
                f"adapter {adapter.location} changes {len(unused)} modules that are no linears "
                f"of this model: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}",
                "train an adapter of the attention's and the MLP's projections alone, or merge "
                "it into the checkpoint",
            )

    def _factors(self, adapter: Adapter, linear: _AdaptedLinear, index: int) -> Factors | None:
        """This rank's share of what an adapter adds to a part; None: nothing."""
        module, part, in_features = linear.modules[index], linear.parts[index], linear.in_features
        own = adapter.modules.get(module)
        if own is None:
            return None
        found = own.up.shape[0], own.down.shape[1]
        if found != (part.rows, in_features):
            raise CheckpointError(
                f"adapter {adapter.location} is for a {module} of {found[0]} x {found[1]}, the "
                f"model's has {part.rows} x {in_features}",
                "check that adapter and model belong together",
            )
        # Ranks that divide a linear's inputs divide the first factor, else the second.
        inputs = part.split if part.split is Split.COLUMNS else Split.WHOLE
        down = share_of(Part(module, own.rank, split=inputs), (in_features,), self._parallel)
        up = share_of(part.of_rows(), (own.rank,), self._parallel)
        at = self.room.dtype, self.room.device
        return Factors(down.of(own.down, *at), up.of(own.up, *at), own.scale)

    def _adapted(self, node: Any) -> Any:
        """A part of the model with adapters beside its linears; itself where it has none."""
        if isinstance(node, Linear | RowParallelLinear):
            return self._linear(node)
        if isinstance(node, RoundingNorm):
            # An adapter's product reads rows that are not rounded; its weight's rounds them itself.
            return RMSNorm(node.kernels, node.weight, node.eps)
        if not is_dataclass(node) or isinstance(node, type):
            return node
        parts = {one.name: getattr(node, one.name) for one in fields(node)}
        # Experts multiply other rows than those of the pass.
        found = {name: self._adapted(one) for name, one in parts.items() if name != "experts"}
        changed = {name: one for name, one in found.items() if one is not parts[name]}
        if not changed:
            return node
        if isinstance(node, DecoderLayer):
            changed["whole"] = None
        return replace(node, **changed)

    def _linear(self, linear: Linear | RowParallelLinear) -> Projection:
        parts = linear.parts
        modules = tuple(_LAYERS + one.name.partition(_LAYERS)[2] for one in parts)
        if self._wanted is not None and self._wanted.isdisjoint(modules):
            return linear
        sizes = [share_of(one.of_rows(), (1,), self._parallel).num_rows for one in parts]
        weight = self._kernels.adapt(linear.weight, sizes, self.room, self.rows)
        divided = any(one.split is Split.COLUMNS for one in parts)
        in_features = linear.weight.in_features * (self._parallel.size if divided else 1)
        self._linears.append(_AdaptedLinear(modules, parts, in_features, weight.update))
        return replace(linear, weight=weight)

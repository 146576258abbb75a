"""A model whose rows may have LoRA adapters: it shares the weights of the one whose rows have none.

Both run side by side: a step whose requests have no adapters is one of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from sametoken.errors import UnsupportedError
from sametoken.layers.feed_forward import (
    DividedExperts,
    LayerExperts,
    PreciseRouter,
    WholeExperts,
)
from sametoken.layers.linear import Linear, Projection, RowParallelLinear
from sametoken.layers.norm import RMSNorm, RoundingNorm
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.share import Part, Split, share_of
from sametoken.models.adapted_experts import ExpertPlaces, is_transposed
from sametoken.models.adapter_factors import Adapter, RankShares, experts_of, module_name
from sametoken.models.decoder import Decoder
from sametoken.ops.model.low_rank import Factors, Room, RowAdapters, Update
from sametoken.ops.model.low_rank_experts import ExpertSizes


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

    def factors(self, adapter: Adapter, shares: RankShares) -> list[Factors | None]:
        """This rank's share of what an adapter adds to each part; errors as ``RankShares.of``."""
        found = []
        for module, part in zip(self.modules, self.parts, strict=True):
            own = adapter.modules.get(module)
            found.append(own and shares.of(own, module, part, self.in_features, adapter.location))
        return found


class AdaptedModel:
    """A decoder beside whose linears and experts adapters have places, numbered from 1 on.

    Args:
        target: the model whose rows have none.
        parallel: the ranks that divide it.
        room: see below.
        modules: those that may be adapted; None: all linears of its layers.
        experts: whether all its experts may be, too.

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
        *,
        experts: bool = False,
    ) -> None:
        self.rows, self.places = RowAdapters(), dict[int, int]()
        self._kernels, self._parallel, self.room = target.kernels, parallel, room
        self._wanted, self._linears = modules, list[_AdaptedLinear]()
        self._all_experts, self._experts = experts, list[ExpertPlaces]()
        self._has_experts = False
        self.decoder = target.with_layers(tuple(map(self._adapted, target.layers)))

    @property
    def most_bytes(self) -> int:
        """Of an adapter's factors in the widest dtype, float64."""
        sizes = [one.in_features + part.rows for one in self._linears for part in one.parts]
        sizes += [one.most_elements for one in self._experts]
        return sum(sizes) * self.room.rank * 8

    def prepare(self, adapter: Adapter, number: int) -> Callable[[int], None]:
        """Bring an adapter to the device; what is returned writes it, between steps, to a place.

        Args:
            adapter: the adapter.
            number: by which requests have it; no other one ever has it.

        Returns:
            A function of the place, which no unfinished request's adapter may have.

        Raises:
            CheckpointError: its factors have other shapes than the model's linears and experts.
            UnsupportedError: a module is none of the model's, or there is no room for it or for its
                rank.
        """
        self._require_known(adapter)
        if adapter.rank > self.room.rank:
            raise UnsupportedError(
                f"adapter {adapter.location} has rank {adapter.rank}, and there is room for "
                f"{self.room.rank}",
                "start with a larger max_lora_rank",
            )
        shares = RankShares(self._parallel, self.room.dtype, self.room.device)
        # All experts of a layer come to the device together.
        on_host = replace(shares, device=torch.device("cpu"))
        writes = [one.update.prepare(one.factors(adapter, shares)) for one in self._linears]
        transposed = is_transposed(adapter, self._experts)
        writes += [
            one.experts.prepare(one.factors(adapter, on_host, transposed=transposed))
            for one in self._experts
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
        unused = {*adapter.modules, *adapter.stacks} - known
        for one in self._experts:
            unused -= one.known
        named = ", ".join(sorted(unused)[:3]) + (", ..." if len(unused) > 3 else "")
        if self._has_experts and not self._experts and any(map(experts_of, unused)):
            raise UnsupportedError(
                f"adapter {adapter.location} changes experts, and there is no room beside them",
                "start with lora_experts",
            )
        if unused:
            raise UnsupportedError(
                f"adapter {adapter.location} changes {len(unused)} modules that are no linears "
                f"or experts of this model: {named}",
                "train an adapter of the attention's, the MLP's and the experts' projections "
                "alone, or merge it into the checkpoint",
            )

    def _adapted(self, node: Any) -> Any:
        """A part of the model with adapters beside what it multiplies; itself where it has none."""
        if isinstance(node, Linear | RowParallelLinear | PreciseRouter):
            return self._linear(node)
        if isinstance(node, WholeExperts | DividedExperts):
            return self._beside_experts(node)
        if isinstance(node, RoundingNorm):
            # An adapter's product reads rows that are not rounded; its weight's rounds them itself.
            return RMSNorm(node.kernels, node.weight, node.eps)
        if not is_dataclass(node) or isinstance(node, type):
            return node
        parts = {one.name: getattr(node, one.name) for one in fields(node)}
        found = {name: self._adapted(one) for name, one in parts.items()}
        changed = {name: one for name, one in found.items() if one is not parts[name]}
        return replace(node, **changed) if changed else node

    def _linear(self, linear: Linear | RowParallelLinear | PreciseRouter) -> Projection:
        parts = linear.parts
        modules = tuple(module_name(one.name) for one in parts)
        if self._wanted is not None and self._wanted.isdisjoint(modules):
            return linear
        sizes = [share_of(one.of_rows(), (1,), self._parallel).num_rows for one in parts]
        weight = self._kernels.adapt(linear.weight, sizes, self.room, self.rows)
        divided = any(one.split is Split.COLUMNS for one in parts)
        in_features = linear.weight.in_features * (self._parallel.size if divided else 1)
        self._linears.append(_AdaptedLinear(modules, parts, in_features, weight.update))
        return replace(linear, weight=weight)

    def _beside_experts(self, node: LayerExperts) -> LayerExperts:
        modules, name = node.modules, module_name(node.modules.name)
        self._has_experts = True
        if not (self._all_experts or (self._wanted and name in self._wanted)):
            return node
        inputs = tuple(share_of(one, (1,), self._parallel).num_rows for one in modules.inputs)
        sizes = ExpertSizes(modules.count, modules.output.rows, inputs)
        experts = self._kernels.adapt_experts(node.experts, sizes, self.room, self.rows)
        self._experts.append(ExpertPlaces(name, modules, experts))
        return replace(node, experts=experts)

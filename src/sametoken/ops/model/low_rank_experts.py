"""Low-rank adapters beside a layer's experts: a row adds its adapter's product to each expert's.

Arithmetic and promises are those of ``low_rank``, of pairs of a row and an expert that it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sametoken.ops.model.low_rank import AdaptedWeight, Factors, RowAdapters
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.weight import Experts


class ExpertSizes(NamedTuple):
    """Sizes of a layer's experts on this rank.

    Attributes:
        num_experts: E.
        hidden: H, of the rows that they read.
        inputs: output features of the parts of an expert's first matrix: gate and up, or up alone.
    """

    num_experts: int
    hidden: int
    inputs: tuple[int, ...]


class ExpertFactors(NamedTuple):
    """What an adapter adds to an expert; None: nothing.

    Attributes:
        inputs: for each part of its first matrix.
        output: for its second.
    """

    inputs: Sequence[Factors | None]
    output: Factors | None


@runtime_checkable
class AdaptedExperts(Experts, Protocol):
    """Experts beside which each row adds its adapter's products."""

    @property
    def pair_bytes(self) -> int:
        """Bytes beside the results that a row needs on a GPU for each expert that it chooses."""
        ...

    def prepare(self, factors: Sequence[ExpertFactors]) -> Callable[[int], None]:
        """As ``Update.prepare``, of all experts."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedSeparateExperts(SeparateExperts):
    """``AdaptedExperts`` whose matrices are each an ``AdaptedWeight``, as on a CPU.

    Attributes:
        plain: the experts without adapters.
        rows: the adapter of each row of the pass.
        own_rows: that of each row of one expert, which the matrices read.
        changed: the experts that each adapter changes, by its place from 1 on.
    """

    gate_up: Sequence[AdaptedWeight]
    down: Sequence[AdaptedWeight]
    plain: SeparateExperts = field(kw_only=True)
    rows: RowAdapters = field(kw_only=True)
    own_rows: RowAdapters = field(kw_only=True)
    changed: dict[int, frozenset[int]] = field(default_factory=dict, kw_only=True)

    @property
    def pair_bytes(self) -> int:
        """0: of a CPU."""
        return 0

    def prepare(self, factors: Sequence[ExpertFactors]) -> Callable[[int], None]:
        """See ``AdaptedExperts``."""
        writes = [
            weight.update.prepare(parts)
            for gate_up, down, own in zip(self.gate_up, self.down, factors, strict=True)
            for weight, parts in ((gate_up, own.inputs), (down, [own.output]))
        ]

        changed = frozenset(
            index for index, own in enumerate(factors) if own.output or any(own.inputs)
        )

        def write_all(place: int) -> None:
            for write in writes:
                write(place)
            self.changed[place] = changed

        return write_all

    def of_expert(
        self, expert: int, x: Tensor, rows: Tensor, out_dtype: torch.dtype | None
    ) -> Tensor:
        """See ``SeparateExperts``; one that no adapter of the pass changes has its own speed."""
        chosen = self.rows.of(x)
        if not any(expert in self.changed.get(place, ()) for place, _ in chosen.groups):
            return self.plain.of_expert(expert, x, rows, out_dtype)
        self.own_rows.begin(chosen.numbers[rows])
        return SeparateExperts.of_expert(self, expert, x, rows, out_dtype)

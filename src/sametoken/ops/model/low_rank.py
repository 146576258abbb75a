"""Low-rank adapters (LoRA, arXiv:2106.09685) beside a weight: each row adds its adapter's product.

An adapter's part adds ``scale * up @ (down @ x)``. Sums are in fp32, in an order that depends on
the row alone; what is between the factors is rounded to the dtype of ``x``. A row without an
adapter, or whose adapter has no factors here, keeps the bits of the weight's own product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to a matrix [N, K]: ``scale * up @ down``.

    Attributes:
        down: [r, K].
        up: [N, r].
        scale: not 0.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class Room:
    """Memory beside every matrix.

    Attributes:
        count: adapters that have a place in it.
        rank: the largest of theirs.
        dtype, device: of their factors.
    """

    count: int
    rank: int
    dtype: torch.dtype
    device: torch.device


class Chosen:
    """The adapters that the rows of a pass chose.

    Args:
        numbers: [T] int64, the place of each row's adapter, from 1 on; 0: it has none.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor | None], ...]:
        """Each adapter with the index of its rows; None: it has all rows."""
        found = [number for number in self.numbers.unique().tolist() if number]
        if len(found) == 1 and self.numbers.all():
            return ((found[0], None),)
        return tuple((number, (self.numbers == number).nonzero()[:, 0]) for number in found)


class RowAdapters:
    """What the rows of the target's newest pass chose.

    ``AdaptedTarget`` writes it before the layers of a pass read it.
    """

    def __init__(self) -> None:
        self._chosen: Chosen | None = None

    def begin(self, numbers: Tensor) -> None:
        """Begin a pass: [T] int64, an adapter for each of its rows."""
        self._chosen = Chosen(numbers)

    def of(self, x: Tensor) -> Chosen:
        """For a product of all rows of the pass.

        Raises:
            InvariantError: ``x`` has not as many rows as the pass.
        """
        chosen = self._chosen
        if chosen is None or chosen.numbers.shape[0] != x.shape[0]:
            raise InvariantError(f"a product of {x.shape[0]} rows is not of all rows of a pass")
        return chosen


class Update(Protocol):
    """What adapters add to a product, in the layout of a backend; nothing until one is written."""

    @property
    def nbytes(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Bytes beside the result that a row needs on a GPU."""
        ...

    def prepare(self, parts: Sequence[Factors | None]) -> Callable[[int], None]:
        """Bring an adapter to the device; what is returned writes it, between steps, to a place.

        Args:
            parts: its factors for each part; None: it adds nothing there.

        Returns:
            A function of the place, 1 to the room's count, over whose adapter it writes.
        """
        ...

    def begin(self, x: Tensor, chosen: Chosen) -> Callable[[Tensor], None]:
        """Begin each row's adapter's product of ``x`` [T, K], before the weight's own.

        Returns:
            What adds it to the weight's product of ``x``, [T, N].
        """
        ...


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A weight and the adapters beside it, as a ``Weight``.

    Attributes:
        weight: the checkpoint's.
        update: of the adapters.
        rows: the adapter of each row.
        silu_mul: [T, 2I] to [T, I], as in ``Weight.gated_matmul``.
    """

    weight: Weight
    update: Update
    rows: RowAdapters
    silu_mul: Callable[[Tensor], Tensor]

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and of the adapters."""
        return self.weight.nbytes + self.update.nbytes

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See ``Weight``; sums that are not rounded get the adapters' unrounded."""
        # The weight's kernel starts, and loads its weights, while the first factor's runs.
        add = self.update.begin(x, self.rows.of(x))
        out = self.weight.matmul(x, bias, out_dtype)
        add(out)
        return out

    def gated_matmul(self, x: Tensor) -> Tensor:
        """See ``Weight``."""
        return self.silu_mul(self.matmul(x))


class PartProducts(NamedTuple):
    """One adapter's products beside a range of the output features."""

    features: slice
    down: Weight
    up: Weight
    scale: float


@dataclass(frozen=True, slots=True)
class SeparateUpdates:
    """``Update`` whose adapters have products of their own, as on a CPU.

    Attributes:
        pack: makes a factor a weight.
        sizes: output features of the parts.
        adapters: the parts that each adapter has, by its place from 1 on.
    """

    pack: Callable[[Tensor], Weight]
    sizes: tuple[int, ...]
    adapters: list[tuple[PartProducts, ...]]

    @classmethod
    def of(
        cls, pack: Callable[[Tensor], Weight], sizes: Sequence[int], room: Room
    ) -> SeparateUpdates:
        """See ``Packing.adapt``."""
        return cls(pack, tuple(sizes), [()] * room.count)

    def prepare(self, parts: Sequence[Factors | None]) -> Callable[[int], None]:
        """See ``Update``."""
        first, made = 0, []
        for own, size in zip(parts, self.sizes, strict=True):
            if own is not None:
                features = slice(first, first + size)
                made.append(
                    PartProducts(features, self.pack(own.down), self.pack(own.up), own.scale)
                )
            first += size

        def write(place: int) -> None:
            self.adapters[place - 1] = tuple(made)

        return write

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        parts = (part for adapter in self.adapters for part in adapter)
        return sum(part.down.nbytes + part.up.nbytes for part in parts)

    @property
    def row_bytes(self) -> int:
        """0: of a CPU."""
        return 0

    def begin(self, x: Tensor, chosen: Chosen) -> Callable[[Tensor], None]:
        """See ``Update``."""
        return partial(self._add, x, chosen)

    def _add(self, x: Tensor, chosen: Chosen, out: Tensor) -> None:
        for number, index in chosen.groups:
            rows = x if index is None else x[index]
            for part in self.adapters[number - 1]:
                own = out[:, part.features]
                added = part.up.matmul(part.down.matmul(rows), out_dtype=torch.float32)
                # Rounded after each: one operation may round once in some elements.
                added.mul_(part.scale)
                if index is None:
                    own.copy_(added.add_(own))
                else:
                    own.index_copy_(0, index, added.add_(own[index]).to(out.dtype))

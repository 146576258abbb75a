"""From a checkpoint's tensors to packed weights, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.kernels.interface import Kernels, PackedWeight
from sametoken.layers.linear import Linear, Projection, RowParallelLinear
from sametoken.layers.parallel import ALONE, TensorParallel

CHUNK_ELEMENTS = 1 << 20


class TensorSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names.

    Attributes:
        location: the file or directory, for messages.
    """

    location: str

    def names(self) -> Collection[str]:
        """Every tensor's name; those without a Hugging Face name keep their own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that exists."""
        ...

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The tensor in order, as tensors of whole rows, of any floating dtype, on any device.

        Raises:
            CheckpointError: the data cannot be read.
            UnsupportedError: the data is not of a floating dtype.
        """
        ...


class Split(Enum):
    """What of a tensor each of several ranks holds: all, or an equal run of rows or columns."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that becomes ``rows`` rows of a fused weight.

    Attributes:
        rows: of the whole tensor, as the checkpoint has it.
        places: [rows] int64, a permutation on the host: row i of the tensor becomes row
            ``places[i]``. None: row i. Only of a tensor that is not split.
        split: how ranks divide the tensor among them.
    """

    name: str
    rows: int
    places: Tensor | None = None
    split: Split = Split.WHOLE


@dataclass(frozen=True, slots=True)
class Share:
    """The rows and columns of a tensor that one rank holds; of a vector only rows count."""

    rows: range
    columns: range

    def copy(self, destination: Tensor, chunk: Tensor, first: int) -> None:
        """Copy what the share has of a chunk whose row 0 is the tensor's row ``first``."""
        begin = max(self.rows.start, first)
        end = min(self.rows.stop, first + chunk.shape[0])
        if begin < end:
            wanted = chunk[begin - first : end - first]
            if chunk.dim() > 1:
                wanted = wanted[:, self.columns.start : self.columns.stop]
            destination[begin - self.rows.start : end - self.rows.start].copy_(wanted)


def _of_rank(whole: range, parallel: TensorParallel) -> range:
    size = len(whole) // parallel.size
    return whole[parallel.rank * size : (parallel.rank + 1) * size]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads tensors, checks them, and packs them for one bundle of kernels.

    Shapes that callers give are the checkpoint's; of a split tensor this rank's share is
    read, and the shape of what is returned is the share's.

    Attributes:
        dtype: what every weight is converted to.
        device: where every weight goes.
        parallel: the ranks that divide split tensors among them.
    """

    source: TensorSource
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel = ALONE
    _read: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.source.names()

    def vector(self, name: str, size: int) -> Tensor:
        """A [size] tensor such as a norm's weight."""
        return self._filled((size,), (Part(name, size),))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that stays as it is, in ``dtype``, by default the reader's."""
        return self._filled(shape, (Part(name, shape[0]),), dtype)

    def packed_stack(self, name: str, shape: tuple[int, int, int]) -> list[PackedWeight]:
        """Each of the [E, N, K] matrices of one tensor, packed by itself."""
        self._require_shape(name, shape)
        packed: list[PackedWeight] = []
        for chunk in self.source.chunks(name):
            for matrix in chunk:
                own = matrix.to(self.device, self.dtype, copy=True)
                self._require_finite(own, name)
                packed.append(self.kernels.pack(own))
        self._read.add(name)
        return packed

    def packed(self, in_features: int, *parts: Part) -> PackedWeight:
        """The parts stacked into one [sum of rows, in_features] weight.

        Raises:
            CheckpointError: a part is missing, of another shape, unreadable, or not finite.
            UnsupportedError: a part is of a dtype that cannot be converted.
        """
        rows = sum(part.rows for part in parts)
        return self.kernels.pack(self._filled((rows, in_features), parts))

    def linear(self, in_features: int, *parts: Part, bias: bool = False) -> Linear:
        """A projection fused of ``parts``, named without their ``.weight`` and ``.bias``."""
        weights = (replace(part, name=f"{part.name}.weight") for part in parts)
        weight = self.packed(in_features, *weights)
        if not bias:
            return Linear(self.kernels, weight)
        biases = tuple(replace(part, name=f"{part.name}.bias") for part in parts)
        rows = sum(part.rows for part in parts)
        return Linear(self.kernels, weight, self._filled((rows,), biases))

    def row_parallel(self, in_features: int, part: Part, *, bias: bool = False) -> Projection:
        """A projection whose input the ranks divide among them; its output is whole."""
        if self.parallel.size == 1:
            return self.linear(in_features, part, bias=bias)
        split = replace(part, name=f"{part.name}.weight", split=Split.COLUMNS)
        weight = self.packed(in_features, split)
        added = self.vector(f"{part.name}.bias", part.rows) if bias else None
        return RowParallelLinear(self.kernels, self.parallel, weight, added)

    def require_equal(self, name: str, copy: str) -> None:
        """Refuse a checkpoint whose second copy of a tied tensor differs from the first.

        Raises:
            CheckpointError: the two differ.
        """
        equal = self.source.shape(name) == self.source.shape(copy) and all(
            torch.equal(a, b)
            for a, b in zip(self.source.chunks(name), self.source.chunks(copy), strict=True)
        )
        if not equal:
            raise CheckpointError(
                f"{self.source.location}: {copy} differs from {name}, to which the config ties it",
                "set tie_word_embeddings to false if the checkpoint means both",
            )
        self._read.add(copy)

    def require_all_read(self, *, allowed: tuple[str, ...], unused: tuple[str, ...] = ()) -> None:
        """Refuse a checkpoint that holds tensors which the model has no use for.

        Args:
            allowed: endings of names that may stay unread.
            unused: beginnings of names that may stay unread.

        Raises:
            UnsupportedError: the model would silently differ from the one that was trained.
        """
        unread = sorted(set(self.source.names()) - self._read)
        unread = [n for n in unread if not (n.endswith(allowed) or n.startswith(unused))]
        if unread:
            shown = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
            raise UnsupportedError(
                f"{self.source.location} holds {len(unread)} tensors that its architecture "
                f"does not use: {shown}",
                "check the architecture and the bias settings in its config",
            )

    def _filled(
        self, shape: tuple[int, ...], parts: tuple[Part, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        # Checked first: a config at odds with the file must not decide what is allocated.
        for part in parts:
            self._require_shape(part.name, (part.rows, *shape[1:]))
        shares = [self._share(part, shape) for part in parts]
        rows = sum(len(share.rows) for share in shares)
        row_shape = shape[1:] if len(shape) == 1 else (len(shares[0].columns), *shape[2:])
        destination = torch.empty((rows, *row_shape), dtype=dtype or self.dtype, device=self.device)
        first = 0
        for part, share in zip(parts, shares, strict=True):
            self._fill(destination[first : first + len(share.rows)], part, share)
            first += len(share.rows)
        return destination

    def _share(self, part: Part, shape: tuple[int, ...]) -> Share:
        """This rank's share of a tensor of ``part.rows`` rows of ``shape[1:]``."""
        rows, columns = range(part.rows), range(shape[1] if len(shape) > 1 else 1)
        if part.split is Split.ROWS:
            rows = _of_rank(rows, self.parallel)
        elif part.split is Split.COLUMNS:
            columns = _of_rank(columns, self.parallel)
        return Share(rows, columns)

    def _require_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        if name not in self:
            raise CheckpointError(
                f"{self.source.location} lacks the tensor {name}",
                "download or convert the checkpoint again",
            )
        found = self.source.shape(name)
        if found != wanted:
            raise CheckpointError(
                f"tensor {name} of {self.source.location} has shape {list(found)}, "
                f"the config wants {list(wanted)}",
                "check that config and weights belong together",
            )

    def _fill(self, destination: Tensor, part: Part, share: Share) -> None:
        """Copy a tensor chunk by chunk, so that no second copy of it ever exists."""
        first = 0
        for chunk in self.source.chunks(part.name):
            last = first + chunk.shape[0]
            if part.places is not None:
                destination[part.places[first:last].to(self.device)] = chunk.to(destination)
            else:
                share.copy(destination, chunk, first)
            first = last
        self._require_finite(destination, part.name)
        self._read.add(part.name)

    def _require_finite(self, tensor: Tensor, name: str) -> None:
        low, high = torch.aminmax(tensor)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise CheckpointError(
                f"tensor {name} of {self.source.location} holds NaN or infinite values"
                f" in {str(tensor.dtype).removeprefix('torch.')}",
                "download or convert the checkpoint again",
            )


def rows_per_chunk(row_elements: int, multiple_of: int = 1) -> int:
    """How many rows of ``row_elements`` to read at once: at least ``multiple_of``."""
    return max(CHUNK_ELEMENTS // (row_elements * multiple_of), 1) * multiple_of

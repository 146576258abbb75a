"""Parts of fused weights and experts, a rank's part of a tensor, and copying it from whole rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from sametoken.layers.parallel import TensorParallel, of_rank


class Split(Enum):
    """A rank's share of a tensor: all of it, or a range of rows or columns, equally long on all."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that becomes rows of a fused weight.

    Attributes:
        rows: rows of the whole tensor in the checkpoint.
        permutation: int64, a permutation on the host: row i of this rank's share becomes row
            ``permutation[i]`` of the weight's part. None: row i.
        split: how ranks divide the tensor.
        output_sizes: sizes of adjacent row ranges, ``rows`` in total, each divided separately
            among ranks; (): all rows are one range.
        ranks_per_share: of each range, how many adjacent ranks have the same share; (): one.
    """

    name: str
    rows: int
    permutation: Tensor | None = None
    split: Split = Split.WHOLE
    output_sizes: tuple[int, ...] = ()
    ranks_per_share: tuple[int, ...] = ()

    def tensor(self, name: str) -> Part:
        """A tensor of the module that this part is named by."""
        return replace(self, name=f"{self.name}.{name}")

    def of_rows(self) -> Part:
        """For what each row has one of: a rank with some columns of all rows keeps all of them."""
        return replace(self, split=Split.WHOLE) if self.split is Split.COLUMNS else self


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The modules of a checkpoint that a layer's experts are.

    Attributes:
        name: of all experts, e.g. "model.layers.0.mlp.experts".
        count: E.
        inputs: of one expert, what reads the hidden states: gate and up, or up alone.
        output: of one expert, what reads the inner features.
        interleaved: rows of gate and up take turns where one matrix holds both.
    """

    name: str
    count: int
    inputs: tuple[Part, ...]
    output: Part
    interleaved: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        count: int,
        hidden: int,
        inner: int,
        *,
        gated: bool = True,
        interleaved: bool = False,
    ) -> ExpertModules:
        """Experts of ``hidden`` to ``inner`` to ``hidden``, whose inner features ranks divide."""
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        inputs = tuple(Part(one, inner, split=Split.ROWS) for one in names)
        return cls(name, count, inputs, Part("down_proj", hidden, split=Split.COLUMNS), interleaved)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a tensor; a vector has only rows.

    Attributes:
        rows: ranges of the tensor's rows, consecutive in the share.
        columns: range of the tensor's columns.
        permutation: as in ``Part``.
    """

    rows: tuple[range, ...]
    columns: range
    permutation: Tensor | None

    @property
    def num_rows(self) -> int:
        """Number of rows of the share."""
        return sum(len(run) for run in self.rows)

    def of(
        self, whole: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Tensor:
        """The share of a whole tensor in new memory, by default of its dtype and device."""
        shape = (self.num_rows, len(self.columns))[: whole.dim()]
        own = whole.new_empty(shape, dtype=dtype, device=device)
        self.copy(own, (whole,))
        return own

    def copy(self, destination: Tensor, chunks: Iterable[Tensor]) -> None:
        """Copy the share of a tensor that comes in chunks of whole rows, in order."""
        first = 0
        for chunk in chunks:
            last, offset = first + chunk.shape[0], 0
            for run in self.rows:
                begin, end = max(run.start, first), min(run.stop, last)
                if begin < end:
                    wanted = chunk[begin - first : end - first]
                    self._put(destination, offset + begin - run.start, wanted)
                offset += len(run)
            first = last

    def _put(self, destination: Tensor, row: int, wanted: Tensor) -> None:
        """Copy rows of the tensor to the share's rows from ``row`` on."""
        if wanted.dim() > 1:
            wanted = wanted[:, self.columns.start : self.columns.stop]
        rows = slice(row, row + wanted.shape[0])
        if self.permutation is None:
            destination[rows].copy_(wanted)
        else:
            destination[self.permutation[rows].to(destination.device)] = wanted.to(destination)


def share_of(part: Part, row_shape: tuple[int, ...], parallel: TensorParallel) -> Share:
    """A rank's share of a [part.rows, *row_shape] tensor."""
    sizes = part.output_sizes or (part.rows,)
    rows = tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
    columns = range(row_shape[0] if row_shape else 1)
    if part.split is Split.ROWS:
        same = part.ranks_per_share or (1,) * len(rows)
        rows = tuple(of_rank(run, parallel, ranks) for run, ranks in zip(rows, same, strict=True))
    elif part.split is Split.COLUMNS:
        columns = of_rank(columns, parallel)
    return Share(rows, columns, part.permutation)

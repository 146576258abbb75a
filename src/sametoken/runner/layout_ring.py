"""Layouts on their way to captured steps: a ring in host memory, counted on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from sametoken.core.layout import TABLE_ROWS, StepShape
from sametoken.kernels.step.ops import StepOps


@dataclass(slots=True)
class LayoutRing:
    """The host writes a layout before each launch, and the launch fetches it by itself.

    Host and device count launches alike, so the n-th launch reads the n-th layout. An entry is
    written again after as many launches as the ring has entries; there must be as many of
    them as launches can be in flight.

    Attributes:
        entries: [N, E] int64 in host memory that the device reaches.
        turn: [1] int64 on the device, launches that it has begun.
        ops: fetch.
    """

    entries: Tensor
    turn: Tensor
    ops: StepOps
    _written: int = 0

    @classmethod
    def allocate(
        cls, num_entries: int, largest: StepShape, ops: StepOps, device: torch.device
    ) -> LayoutRing:
        """A ring for layouts of at most as many requests as ``largest`` has."""
        shape, pinned = (num_entries, TABLE_ROWS * largest.table_width), device.type == "cuda"
        entries = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        return cls(entries, torch.zeros(1, dtype=torch.int64, device=device), ops)

    def memory(self, shape: StepShape) -> Tensor:
        """[TABLE_ROWS, width] int64 on the device, for ``fetch``."""
        return self.turn.new_empty(TABLE_ROWS, shape.table_width)

    def write(self, table: list[list[int]]) -> None:
        """The layout of the next launch, as ``StepLayout.table`` gives it."""
        values = torch.tensor([*chain(*table)], dtype=torch.int64)
        self.entries[self._written % self.entries.shape[0], : values.numel()] = values
        self._written += 1

    def fetch(self, table: Tensor) -> None:
        """Read the next layout into device memory, in stream order; may be captured."""
        self.ops.fetch(self.entries, self.turn, table)

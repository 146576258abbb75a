"""Plans on their way to captured steps: a ring in host memory, counted on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from sametoken.kernels.transfer.triton import fetch
from sametoken.runner.padded import PLAN_FIELDS

#: A row of a plan as ``PaddedStep`` reads it, then its verdict's place among the host's rows.
UploadedRow = tuple[int, ...]

NO_PLACE = -1


@dataclass(slots=True)
class PlanRing:
    """The host writes a plan before each launch, and the launch fetches it by itself.

    Host and device count launches alike, so the n-th launch reads the n-th plan. An entry is
    written again after as many launches as the ring has entries; there must be as many of
    them as launches can be in flight.

    Attributes:
        entries: [N, (4 + 1) * largest batch] int64 in host memory that the device reaches.
        turn: [1] int64 on the device, launches that it has begun.
        reserved_slot: the slot of padding.
    """

    entries: Tensor
    turn: Tensor
    reserved_slot: int
    _written: int = 0

    @classmethod
    def allocate(
        cls, num_entries: int, max_batch: int, reserved_slot: int, device: torch.device
    ) -> PlanRing:
        """A ring for plans of at most ``max_batch`` rows."""
        shape, pinned = (num_entries, (PLAN_FIELDS + 1) * max_batch), device.type == "cuda"
        # An entry that nobody has written is padding: stage reads nothing of such slots.
        entries = torch.full(shape, reserved_slot, dtype=torch.int64, pin_memory=pinned)
        return cls(entries, torch.zeros(1, dtype=torch.int64, device=device), reserved_slot)

    def memory(self, batch: int) -> Tensor:
        """[4 + 1, batch] int64 on the device, for ``fetch``."""
        return self.turn.new_empty(PLAN_FIELDS + 1, batch)

    def write(self, rows: Sequence[UploadedRow], batch: int) -> None:
        """The plan of the next launch, padded to ``batch`` rows."""
        padding = (self.reserved_slot, *[0] * (PLAN_FIELDS - 1), NO_PLACE)
        padded = [*rows, *[padding] * (batch - len(rows))]
        values = torch.tensor([*chain(*zip(*padded, strict=True))], dtype=torch.int64)
        self.entries[self._written % self.entries.shape[0], : values.numel()] = values
        self._written += 1

    def fetch(self, plan: Tensor) -> None:
        """Read the next plan into device memory, in stream order; may be captured."""
        fetch(self.entries, self.turn, plan)

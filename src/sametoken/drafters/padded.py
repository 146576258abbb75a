"""What a drafter may read after a commit, in the padded layout of a captured step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.drafters.context import CatchUp, Chains, DraftContext


@dataclass(frozen=True, slots=True)
class PaddedDraftContext(DraftContext):
    """Every plan row owns as many rows; dead ones stand at position 0 of the reserved slot.

    Nothing here depends on the data in its shapes, so that the whole chain of drafts can
    be captured. Plan rows that do not sample, and padding, draft into the reserved slot.
    """

    def catch_up(self) -> CatchUp:
        """The live rows: positions ``start .. end - 1`` of every plan row."""
        return self._spans(self.end, self._rows_per_plan_row)

    def catch_up_with_newest(self) -> CatchUp:
        """The live rows, and the newest token at ``end`` of every row that samples."""
        return self._spans(self.end + self.samples, self._rows_per_plan_row + 1)

    def chains(self) -> Chains:
        """Where the rows that sample go on; the others stand in the reserved slot."""
        owner = torch.arange(self.slots.shape[0], device=self.slots.device)
        slots = torch.where(self.samples, self.slots, self._sequences.reserved_slot)
        return Chains(owner, slots, torch.where(self.samples, self.end, 0))

    @property
    def _rows_per_plan_row(self) -> int:
        return self.x.token_ids.shape[0] // self.slots.shape[0]

    def _spans(self, stop: Tensor, width: int) -> CatchUp:
        """Positions ``start .. stop - 1`` of every plan row, laid out ``width`` rows each."""
        offset = torch.arange(width, device=stop.device)
        positions = self.start[:, None] + offset
        live = positions < stop[:, None]
        slots = torch.where(live, self.slots[:, None], self._sequences.reserved_slot)
        positions = torch.where(live, positions, 0)
        first = self.x.row_starts[:-1, None]
        source = first + offset.clamp(max=self._rows_per_plan_row - 1)
        plan_rows = torch.arange(stop.shape[0], device=stop.device)
        last = plan_rows * width + (stop - self.start - 1).clamp(min=0)
        computed = live & (positions < self.end[:, None])
        return CatchUp(
            slots.flatten(),
            positions.flatten(),
            computed.flatten(),
            source.flatten(),
            last,
            width,
        )

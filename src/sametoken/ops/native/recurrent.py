"""A pass over recurrent state by the C kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.recurrent.layout import SlotRows
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import Folded, LayerMemory, RawRows, RuleWeights

GatedDeltaKernel = Callable[[Tensor, GatedDeltaParams, RawRows, LayerMemory], Tensor]


@dataclass(frozen=True, slots=True)
class NativePass:
    """``RecurrentPass`` in C; rules without C kernels run row by row.

    Attributes:
        table: ``part_table`` of the pass.
    """

    gated_delta: GatedDeltaKernel
    table: Tensor
    row_by_row: RowByRowPass

    @classmethod
    def begin(
        cls, rows: AttentionRows, folded: Folded, gated_delta: GatedDeltaKernel
    ) -> NativePass:
        """See ``Kernels.begin_pass``."""
        row_by_row = RowByRowPass.begin(rows, folded)
        return cls(gated_delta, part_table(row_by_row.parts), row_by_row)

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """See ``RecurrentPass.run``."""
        if not isinstance(weights, GatedDeltaParams):
            return self.row_by_row.run(weights, raw, memory)
        memory.require_dtype(raw)
        return self.gated_delta(self.table, weights, raw, memory)

    def finish(self) -> None:
        """See ``RecurrentPass.finish``."""
        self.row_by_row.finish()


def part_table(parts: Sequence[SlotRows]) -> Tensor:
    """[P, 7] int64: parts of a pass in the order of their rows; ``slot_part`` of gated_delta.c."""
    table, rows_before = [], 0
    for part in parts:
        counts = (part.first_row, part.num_rows, part.num_folded, part.num_lasting)
        table.append((part.slot, int(part.starts), *counts, rows_before))
        rows_before += part.num_folded + part.num_rows
    return torch.tensor(table, dtype=torch.int64).view(-1, 7)

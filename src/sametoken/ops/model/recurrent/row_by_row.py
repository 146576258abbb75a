"""Fold by position in plain PyTorch for any rule: the kernels' reference, and the fallback.

A slot keeps one state per layer, which covers positions below ``Folded.position``, and the raw
inputs of the rows from there on (pending). A pass whose first row of the slot is at position p0
first runs the pending rows below p0: the accepted drafts, since p0 positions are computed. Rejected
drafts are at p0 and above and never run again (docs/decisions/0009-fold-by-position.md;
tests/unit/ops/model/recurrent/test_runs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.one_thread import one_thread
from sametoken.ops.model.recurrent.layout import SlotRows, slot_rows
from sametoken.ops.model.recurrent.rule import (
    FAST_ROWS,
    Folded,
    LayerMemory,
    RawRows,
    RowFunction,
    RuleWeights,
)


@dataclass(frozen=True, slots=True)
class RowByRowPass:
    """``RecurrentPass`` that runs rows one by one, or by chunks where they are in the fast form.

    Attributes:
        parts: each slot's rows, those in the fast form last.
    """

    folded: Folded
    parts: tuple[SlotRows, ...]

    @classmethod
    def begin(cls, rows: AttentionRows, folded: Folded) -> RowByRowPass:
        """See ``Kernels.begin_pass``."""
        return cls(folded, slot_rows(rows, folded))

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """See ``RecurrentPass.run``."""
        given, kept = raw.mixed.dtype, memory.history.dtype
        if torch.promote_types(given, kept) != kept:
            raise InvariantError(f"raw inputs in {given} are kept in {kept}")
        run_row, gates = weights.row_function(), torch.cat(raw.gates, dim=-1)
        out = gates.new_empty(gates.shape[0], weights.rule.out_features)
        for part in self.walked:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            out[rows] = self._run_slot(part, raw.mixed[rows], gates[rows], memory, run_row)
        self.run_fast(weights, raw, memory, out)
        return out

    @property
    def walked(self) -> tuple[SlotRows, ...]:
        """The parts that run row by row."""
        return tuple(part for part in self.parts if not part.is_fast)

    def run_fast(
        self, weights: RuleWeights, raw: RawRows, memory: LayerMemory, out: Tensor
    ) -> None:
        """Run the other parts into ``out``, [T, out_features].

        Raises:
            InvariantError: one begins inside of a chunk.
        """
        for part in self.parts[len(self.walked) :]:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            start = 0 if part.starts else int(self.folded.position[part.slot]) + part.num_folded
            _require_multiple(part, start)
            gates = torch.cat([gate[rows] for gate in raw.gates], dim=-1)
            out[rows] = _run_chunks(part, raw.mixed[rows], gates, memory, weights)

    def finish(self) -> None:
        """See ``RecurrentPass.finish``."""
        position, num_pending = self.folded.position, self.folded.num_pending
        for part in self.parts:
            start = 0 if part.starts else position[part.slot]
            position[part.slot] = start + part.num_lasting
            num_pending[part.slot] = part.num_pending

    def _run_slot(
        self,
        part: SlotRows,
        mixed: Tensor,
        gates: Tensor,
        memory: LayerMemory,
        run_row: RowFunction,
    ) -> Tensor:
        """Run pending rows, then the pass's; returns the latter's [num_rows, out_features] fp32."""
        state, history = memory.states[part.slot], memory.history[part.slot]
        pending, pending_gates = memory.pending_mixed[part.slot], memory.pending_gates[part.slot]
        if part.starts:
            state.zero_()
            history.zero_()
        folded, lasting, taps = part.num_folded, part.num_lasting, history.shape[0]
        mixed = torch.cat((history, pending[:folded], mixed))
        gates = torch.cat((pending_gates[:folded], gates))
        out = []
        for row in range(folded + part.num_rows):
            if row == lasting:
                state = state.clone()
            window = mixed[row : row + taps + 1].float()
            out.append(run_row(state, window, gates[row].float()))
        history.copy_(mixed[lasting : lasting + taps])
        pending[: part.num_pending] = mixed[taps + lasting :]
        pending_gates[: part.num_pending] = gates[lasting:]
        return torch.stack(out[folded:])


def _run_chunks(
    part: SlotRows, mixed: Tensor, gates: Tensor, memory: LayerMemory, weights: RuleWeights
) -> Tensor:
    """Run a slot's rows chunk by chunk: [num_rows, out_features] fp32."""
    run_chunk = weights.chunk_function()
    state, history = memory.states[part.slot], memory.history[part.slot]
    if part.starts:
        state.zero_()
        history.zero_()
    taps, out = history.shape[0], []
    mixed = torch.cat((history, mixed))
    with one_thread():
        for first in range(0, part.num_rows, FAST_ROWS):
            chunk = mixed[first : first + taps + FAST_ROWS].float()
            out.append(run_chunk(state, chunk, gates[first : first + FAST_ROWS].float()))
    history.copy_(mixed[part.num_rows :])
    return torch.cat(out)


def _require_multiple(part: SlotRows, position: int) -> None:
    if position % FAST_ROWS:
        raise InvariantError(
            f"slot {part.slot} has rows in the fast form from position {position} on, which is no "
            f"multiple of {FAST_ROWS}"
        )

"""The rows of each slot that a pass folds, commits and leaves pending."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter

import torch

from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.recurrent.rule import FAST_ROWS, Folded
from sametoken.types.fast_prompts import FastForm


@dataclass(frozen=True, slots=True)
class SlotRows:
    """One slot's part in a pass: pending rows to run again, then rows of the pass.

    The first ``num_lasting`` of these ``num_folded + num_rows`` rows advance the stored state; the
    others are the new pending rows.

    Attributes:
        starts: the first row is at position 0, so the slot's former state is void.
        first_row: index of the first row among the pass's rows.
        is_fast: the rows are in the fast form, and all of them last.
    """

    slot: int
    starts: bool
    first_row: int
    num_rows: int
    num_folded: int
    num_lasting: int
    is_fast: bool = False

    @property
    def num_pending(self) -> int:
        """Number of pending rows after the pass."""
        return self.num_folded + self.num_rows - self.num_lasting


def slot_rows(rows: AttentionRows, folded: Folded, state_stride: int = 1) -> tuple[SlotRows, ...]:
    """The parts of a pass, derived from positions only; those in the fast form come last.

    Args:
        rows: the pass's rows; rows on the reserved slot are dead and have no part.
        folded: folded and pending rows of each slot.
        state_stride: lasting rows of a part are a multiple of it, unless it is in the fast form.

    Raises:
        InvariantError: a slot's rows do not follow its folded and pending rows.
    """
    slots, position, prompts = rows.slots, folded.position, rows.fast_prompts
    fast_form = FastForm(prompts.least_len if prompts else 0, FAST_ROWS)
    committed = torch.ones_like(slots) if rows.committed is None else rows.committed
    counts = position[slots], folded.num_pending[slots]
    lengths = prompts.prompt_len[slots] if prompts else torch.zeros_like(slots)
    facts = torch.stack((slots, rows.positions, committed, *counts, lengths))
    parts, first_row, reserved_slot = [], 0, position.shape[0] - 1
    for slot, group in groupby(facts.t().tolist(), key=itemgetter(0)):
        of_slot = list(group)
        if slot != reserved_slot:
            _, first, *_, length = of_slot[0]
            is_fast = first < fast_form.end(length)
            stride = 1 if is_fast else state_stride
            part = _part(of_slot, first_row, folded.max_pending, stride)
            parts.append(replace(part, is_fast=is_fast))
        first_row += len(of_slot)
    return tuple(sorted(parts, key=attrgetter("is_fast")))


def _part(facts: list[list[int]], first_row: int, max_pending: int, state_stride: int) -> SlotRows:
    slot, first, _, folded, pending, _ = facts[0]
    flags = [fact[2] for fact in facts]
    num_committed, starts = sum(flags), first == 0
    num_folded = 0 if starts else first - folded
    # Rows after drafts that are not verified yet do not show which of these were accepted.
    num_lasting = num_folded + num_committed if num_committed else 0
    num_lasting -= num_lasting % state_stride
    part = SlotRows(slot, starts, first_row, len(facts), num_folded, num_lasting)
    follows = starts or 0 <= num_folded <= pending
    in_order = all(flags[:num_committed])
    if not (follows and in_order and part.num_pending <= max_pending):
        raise InvariantError(
            f"slot {slot} has {folded} positions folded and {pending} rows pending; "
            f"{len(facts)} rows from position {first}, {num_committed} of them committed, "
            "do not follow these"
        )
    return part

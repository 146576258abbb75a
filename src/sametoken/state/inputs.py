"""Stage: derive everything one step reads, once, from the device's truth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.core.plan import StepPlan
from sametoken.errors import StaleInputsError
from sametoken.kernels.interface import AttentionRows
from sametoken.kernels.stage import reference
from sametoken.state.sequences import Sequences
from sametoken.state.upload import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step, stamped with its id; they die with it.

    B plan rows, T flat rows, L logits rows. Plan row b owns flat rows
    ``row_starts[b] .. row_starts[b + 1] - 1``: its committed tokens, then its drafts. If
    it samples, its window's ``num_drafts[b] + 1`` logits rows start at
    ``window_starts[b]``.

    Attributes:
        step_id: the step these were staged for.
        slots: [B] int64.
        num_tokens: [B] int64, committed tokens before the step.
        num_computed: [B] int64, computed positions before the step.
        num_query: [B] int64, committed tokens computed in this step.
        num_drafts: [B] int64, drafts in the window.
        samples: [B] bool.
        row_starts: [B + 1] int64.
        token_ids: [T] int64.
        rows: where the flat rows stand.
        row_owner: [T] int64, the plan row of each flat row.
        logits_indices: [L] int64, flat rows whose logits are judged.
        window_starts: [B] int64, first logits row of each plan row's window; rows that do
            not sample own none.
    """

    step_id: int
    slots: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    num_query: Tensor
    num_drafts: Tensor
    samples: Tensor
    row_starts: Tensor
    token_ids: Tensor
    rows: AttentionRows
    row_owner: Tensor
    logits_indices: Tensor
    window_starts: Tensor

    @property
    def logits_owner(self) -> Tensor:
        """[L] int64, the plan row of each logits row."""
        return self.row_owner[self.logits_indices]

    def require_step(self, step_id: int) -> None:
        """Refuse to serve another step.

        Raises:
            StaleInputsError: these inputs were staged for a different step.
        """
        if self.step_id != step_id:
            raise StaleInputsError(
                f"inputs staged for step {self.step_id} were offered to step {step_id}"
            )


def stage(sequences: Sequences, plan: StepPlan) -> StepInputs:
    """Derive the inputs of ``plan`` from the committed lengths and the published drafts.

    Lengths and positions come from the device alone; the plan adds slots, chunk lengths
    and draft limits. Only rows that are live are laid out.
    """
    columns = [(row.slot, row.num_query, row.draft_limit, row.samples) for row in plan.rows]
    plan_rows = upload(columns, sequences.device).view(-1, 4)
    return StepInputs(plan.step_id, **reference.stage(sequences, plan_rows))

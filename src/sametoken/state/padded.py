"""Stage and commit at fixed shapes, for captured steps. Imported where graphs are made alone.

The same facts as ``state.inputs`` and ``state.commit``, by kernels that need no shape from
the data: plan rows are padded to a bucket, and each owns the same number of flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.commit.triton import (
    Chances,
    Judgement,
    PaddedLengths,
    commit,
    judge,
    judge_and_commit,
    publish,
)
from sametoken.kernels.stage.triton import PaddedInputs, stage_chunks, stage_windows
from sametoken.state.inputs import StepInputs

__all__ = [
    "Chances",
    "FixedLayout",
    "Judgement",
    "PaddedInputs",
    "PaddedLengths",
    "commit",
    "judge",
    "judge_and_commit",
    "publish",
    "stage_chunks",
    "stage_windows",
]


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """The index tensors of B plan rows with R flat rows and W window rows each.

    Attributes:
        row_starts: [B + 1] int64.
        row_owner: [B * R] int64.
        window_starts: [B] int64.
    """

    row_starts: Tensor
    row_owner: Tensor
    window_starts: Tensor

    @classmethod
    def of(cls, batch: int, rows: int, window: int, device: torch.device) -> FixedLayout:
        """The layout of a bucket."""
        plan_rows = torch.arange(batch + 1, device=device)
        owner = torch.arange(batch * rows, device=device) // rows
        return cls(plan_rows * rows, owner, plan_rows[:-1] * window)

    def inputs(self, x: PaddedInputs) -> StepInputs:
        """Padded inputs as ``StepInputs``; they live inside one capture and serve no plan.

        Drafters read them after the verdict, so no logits rows are named any more.
        """
        return StepInputs(
            step_id=0,
            slots=x.slots,
            num_tokens=x.num_tokens,
            num_computed=x.num_computed,
            num_query=x.num_query,
            num_drafts=x.num_drafts,
            samples=x.samples,
            row_starts=self.row_starts,
            token_ids=x.token_ids,
            rows=x.rows,
            row_owner=self.row_owner,
            logits_indices=self.row_owner[:0],
            window_starts=self.window_starts,
        )

"""A step's verdict as one tensor, the form in which it travels to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.outcome import HAS_NAN
from sametoken.state.inputs import StepInputs
from sametoken.verification.base import Verdict

#: Columns before the window's tokens: step_id, num_drafts, num_accepted, fault.
NUM_COUNTS = 4


def pack(x: StepInputs, verdict: Verdict, window: int) -> Tensor:
    """[B, 4 + window] int64: the counts of each plan row, then its window's tokens.

    The step id travels along, so that the host can tell a step's verdict from another's.
    Of the tokens, the first ``num_accepted + 1`` of a row that samples mean something.
    """
    step_id = torch.full_like(x.slots, x.step_id)
    faults = torch.where(verdict.stuck > 0, HAS_NAN + verdict.stuck, verdict.poisoned.long())
    columns = (step_id, x.num_drafts, verdict.num_accepted, faults)
    counts = torch.stack(columns, dim=1)
    offset = torch.arange(window, device=x.slots.device)
    # A window may be narrower, and the last may be none: such columns read any token.
    tokens = torch.nn.functional.pad(verdict.tokens, (0, 1))
    where = (x.window_starts[:, None] + offset).clamp(max=tokens.shape[0] - 1)
    return torch.cat((counts, tokens[where]), dim=1)

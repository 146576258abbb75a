"""What every judgement of a step's windows ends in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.state.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Settled:
    """Verdict fields that follow from the number of matching drafts, [B] each.

    Attributes:
        num_accepted, next_token: int64, 0 for poisoned rows and rows that do not sample.
        poisoned: bool, NaN in a row that decided.
    """

    num_accepted: Tensor
    next_token: Tensor
    poisoned: Tensor


def window_offsets(x: StepInputs) -> Tensor:
    """[L] int64, each logits row's place in its window."""
    owner = x.logits_owner
    return torch.arange(owner.shape[0], device=owner.device) - x.window_starts[owner]


def settle(x: StepInputs, tokens: Tensor, has_nan: Tensor, matches: Tensor) -> Settled:
    """End each window after its matching drafts.

    Args:
        x: the step's inputs.
        tokens: [L] int64, the target's own tokens.
        has_nan: [L] bool, rows whose logits held NaN.
        matches: [B] int64, drafts to accept; ignored for rows that do not sample.
    """
    owner = x.logits_owner
    matches = torch.where(x.samples, matches, 0)
    # Rows after the first mismatch decided nothing: what they hold must not matter.
    fatal = has_nan & (window_offsets(x) <= matches[owner])
    poisoned = torch.zeros_like(x.slots).index_add_(0, owner, fatal.long()) > 0
    judged = x.samples & ~poisoned
    num_accepted = torch.where(judged, matches, 0)
    # Rows without a window may start one past the end; they read the padding.
    padded = torch.nn.functional.pad(tokens, (0, 1))
    next_token = torch.where(judged, padded[x.window_starts + num_accepted], 0)
    return Settled(num_accepted, next_token, poisoned)

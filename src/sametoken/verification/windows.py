"""What every judgement of a step's windows ends in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.kernels.interface import SampledRows
from sametoken.state.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Settled:
    """Verdict fields that follow from the number of matching drafts, [B] each.

    Attributes:
        num_accepted, next_token: int64, 0 for poisoned rows and rows that do not sample.
        poisoned: bool, a row that decided is unsound.
    """

    num_accepted: Tensor
    next_token: Tensor
    poisoned: Tensor


def window_offsets(x: StepInputs) -> Tensor:
    """[L] int64, each logits row's place in its window."""
    owner = x.logits_owner
    return torch.arange(owner.shape[0], device=owner.device) - x.window_starts[owner]


def sampled_rows(x: StepInputs) -> SampledRows:
    """Where the logits rows of a compact step stand."""
    at = x.logits_indices
    return SampledRows(
        slots=x.slots[x.logits_owner],
        positions=x.rows.positions[at],
        token_ids=x.token_ids[at],
        offsets=window_offsets(x),
    )


def deciding(x: StepInputs, rows: Tensor, matches: Tensor) -> Tensor:
    """[B] bool: windows in which one of ``rows`` decides.

    Rows after the first mismatch decide nothing: what they hold must not matter.

    Args:
        x: the step's inputs.
        rows: [L] bool.
        matches: [B] int64, matching drafts; ignored for rows that do not sample.
    """
    owner = x.logits_owner
    fatal = rows & (window_offsets(x) <= matches[owner])
    return torch.zeros_like(x.slots).index_add_(0, owner, fatal.long()) > 0


def settle(x: StepInputs, tokens: Tensor, unsound: Tensor, matches: Tensor) -> Settled:
    """End each window after its matching drafts.

    Args:
        x: the step's inputs.
        tokens: [L] int64, the target's own tokens.
        unsound: [L] bool, rows whose logits held NaN or left no token.
        matches: [B] int64, drafts to accept; ignored for rows that do not sample.
    """
    matches = torch.where(x.samples, matches, 0)
    poisoned = deciding(x, unsound, matches)
    judged = x.samples & ~poisoned
    num_accepted = torch.where(judged, matches, 0)
    # Rows without a window may start one past the end; they read the padding.
    padded = torch.nn.functional.pad(tokens, (0, 1))
    next_token = torch.where(judged, padded[x.window_starts + num_accepted], 0)
    return Settled(num_accepted, next_token, poisoned)

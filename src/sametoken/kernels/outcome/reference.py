"""Packing a verdict at fixed shapes, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(
    step_ids: Tensor, num_drafts: Tensor, num_accepted: Tensor, faults: Tensor, tokens: Tensor
) -> Tensor:
    """[B, 4 + W] int64: step id, drafts, accepted drafts and fault, then the window's tokens.

    Args:
        step_ids, num_drafts, num_accepted, faults: [B] int64.
        tokens: [B, W] int64.
    """
    counts = (step_ids, num_drafts, num_accepted, faults)
    return torch.cat((torch.stack(counts, dim=1), tokens), dim=1)

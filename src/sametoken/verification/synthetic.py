"""Synthetic acceptance: drafts accepted by chance at given rates, to measure times alone.

The target's logits are computed and its tokens chosen as ever, so that a step takes the time
it takes; but which drafts are accepted is drawn (``StepOps.verify``), and what is emitted means
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def conditional_rates(unconditional: Sequence[float], device: torch.device) -> Tensor:
    """[k] fp32: how often draft i is accepted if all before it are. Made once, on start-up.

    Args:
        unconditional: k rates from 0 to 1, none above the one before it: how often draft i
            and all before it are accepted (``SpeculativeConfig.synthetic_rates``).
        device: where steps run.
    """
    before = (1.0, *unconditional)
    rates = [
        rate / last if last else 0.0 for rate, last in zip(unconditional, before, strict=False)
    ]
    return torch.tensor(rates, dtype=torch.float32, device=device)

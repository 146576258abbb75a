"""Synthetic acceptance in plain PyTorch; also the CPU path.

Noise is SplitMix64 (Steele et al., OOPSLA 2014), whose word number p from a seed is known
without the words before it: it has no state, so no batch and no schedule can change a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The golden ratio in 64 bits and the generator's two factors, as int64 holds them.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FACTOR_30 = 0xBF58476D1CE4E5B9 - (1 << 64)
FACTOR_27 = 0x94D049BB133111EB - (1 << 64)


def accepted(rates: Tensor, seeds: Tensor, positions: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts of each window are accepted.

    Args:
        rates: [k] fp32, how often draft i is accepted if all before it are.
        seeds: [B] int64, 0..2^63-1.
        positions: [B] int64, where draft 1 would stand.
        num_drafts: [B] int64, 0..k.

    Returns:
        [B] int64, 0..num_drafts.
    """
    index = torch.arange(rates.shape[0], device=rates.device)
    noise = uniform(seeds[:, None], positions[:, None] + index)
    hit = (noise < rates) & (index < num_drafts[:, None])
    return hit.long().cumprod(dim=1).sum(dim=1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """fp32 in [0, 1), a function of (seed, position) alone; int64 tensors that broadcast."""
    word = seeds + (positions + 1) * STEP
    for shift, factor in ((30, FACTOR_30), (27, FACTOR_27)):
        # int64 shifts copy the sign, so the copies are masked away.
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * factor
    # The generator's last step leaves its upper 31 bits, of which these are 24, as they are.
    return ((word >> 40) & 0xFFFFFF) * 2.0**-24

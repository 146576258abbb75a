"""Mamba-2's state space rule of one row in plain PyTorch; the CPU path without a compiler.

One row at a time, so shapes, the order of every sum and the SIMD lane of every element never
depend on the number of rows in a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def time_step(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """The time step of each head: [.., H] fp32, ``softplus(dt + dt_bias)`` within ``limit``.

    Args:
        dt: [.., H] fp32, a row's raw gate, or those of several.
        dt_bias: [H] fp32.
        limit: least and largest time step.
    """
    return torch.nn.functional.softplus(dt + dt_bias).clamp(*limit)


def advance(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    """Run one row: ``S = decay * S + step * x (outer) b`` in place, then ``S c``: [H, P] fp32.

    Args:
        state: [H, P, N] fp32, contiguous.
        x: [H, P] fp32.
        b, c: [G, N] fp32; each serves H / G adjacent heads.
        decay: [H] fp32, ``exp(step * A)`` with A below 0.
        step: [H] fp32, the time step.
    """
    heads_per_group = x.shape[0] // b.shape[0]
    b = b.repeat_interleave(heads_per_group, dim=0)[:, None, :]
    c = c.repeat_interleave(heads_per_group, dim=0)[:, None, :]
    state *= decay[:, None, None]
    state += (x * step[:, None])[:, :, None] * b
    return (state * c).sum(dim=-1)

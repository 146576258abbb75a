"""Gates and gated delta rule of one row in plain PyTorch; the CPU path without a compiler.

One row at a time, so shapes, the order of every sum and the SIMD lane of every element never
depend on the number of rows in a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM_EPS = 1e-6


def gates(a: Tensor, b: Tensor, decay_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and beta of one row: two [Hv] fp32.

    Args:
        a, b: [Hv] fp32, the row's raw gates.
        decay_rate: [Hv] fp32, ``exp(A_log)``.
        dt_bias: [Hv] fp32.
    """
    return -decay_rate * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()


def advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Run one row: update the state in place and read it with q: [Hv, Dv] fp32.

    q and k are normalised here; each serves Hv / Hk adjacent value heads.

    Args:
        state: [Hv, Dk, Dv] fp32, contiguous.
        q, k: [Hk, Dk] fp32.
        v: [Hv, Dv] fp32.
        log_decay, beta: [Hv] fp32.
    """
    heads_per_key = v.shape[0] // k.shape[0]
    q = normalised(q) / q.shape[-1] ** 0.5
    q = q.repeat_interleave(heads_per_key, dim=0)[..., None]
    k = normalised(k).repeat_interleave(heads_per_key, dim=0)[..., None]
    state *= log_decay.exp()[:, None, None]
    delta = (v - (state * k).sum(dim=-2)) * beta[:, None]
    state += k * delta[:, None, :]
    return (state * q).sum(dim=-2)


def normalised(x: Tensor) -> Tensor:
    """Vectors of length 1, along the last dimension."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + NORM_EPS)

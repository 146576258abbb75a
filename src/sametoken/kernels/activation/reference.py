"""The gated activation in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2I] = [gate | up], in fp32, rounded once: [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)

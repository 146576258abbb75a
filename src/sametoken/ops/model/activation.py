"""The gated activation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [T, 2I] = [gate | up], in fp32, rounded once: [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` of two [T, W], in fp32, rounded once."""
    return (_by_row(torch.sigmoid, gate) * x.float()).to(x.dtype)


def silu(gate: Tensor) -> Tensor:
    """``silu(gate)`` of [T, W] in fp32."""
    return _by_row(F.silu, gate)


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of every element of [T, W], in fp32.

    Vector units leave a rest of the elements to scalar code, whose bits differ: in memory
    without gaps that would be the last elements of the last row, here they are of each row.
    """
    padded = torch.zeros(x.shape[0], x.shape[1] + 1)
    rows = padded[:, : x.shape[1]]
    rows.copy_(x)
    return function(rows)

"""Activations in plain PyTorch."""

from __future__ import annotations

import math
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
    return (sigmoid(gate) * x.float()).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2`` in fp32, rounded once."""
    return F.relu(x.float()).square().to(x.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See ``Kernels.gelu_mul``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    slope = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (gate * sigmoid(slope) * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """See ``Kernels.clamped_swiglu``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """See ``Kernels.soft_cap``."""
    return _by_row(torch.tanh, logits / cap) * cap


def sigmoid(x: Tensor) -> Tensor:
    """``sigmoid(x)`` of [T, W] in fp32."""
    return _by_row(torch.sigmoid, x)


def silu(gate: Tensor) -> Tensor:
    """``silu(gate)`` of [T, W] in fp32."""
    return _by_row(F.silu, gate)


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an element-wise function to [T, W] in fp32, with the same bits for every row.

    SIMD code handles the remaining elements in scalar code, whose bits differ. In contiguous memory
    those are the last elements of the last row; with padding they are the last of each row.
    """
    padded = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.float32, device=x.device)
    rows = padded[:, : x.shape[1]]
    rows.copy_(x)
    return function(rows)

"""The short convolution of a row in plain PyTorch, for every rule that has one."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve_row(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the depthwise convolution at one position, or at each of several: [..., C] fp32.

    Args:
        window: [..., K, C] fp32, inputs of the K - 1 positions before, then the position's own.
        weight: [K, C] fp32.
        bias: [C] fp32 or None.
    """
    summed = (window * weight).sum(dim=-2)
    return torch.nn.functional.silu(summed if bias is None else summed + bias)

"""The convolution of one row in plain PyTorch; also the path of a CPU without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve_row(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the depthwise convolution at one position: [C] fp32.

    Args:
        window: [K, C] fp32, the position's input last, the K - 1 before it first.
        weight: [K, C] fp32.
        bias: [C] fp32 or None.
    """
    summed = (window * weight).sum(dim=0)
    return torch.nn.functional.silu(summed if bias is None else summed + bias)

"""The sum of tensor-parallel partial products in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def partial_sum(partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """[size, T, N] fp32 -> [T, N]; see ``Kernels.partial_sum``."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return (total if bias is None else total + bias.float()).to(dtype)

"""The memory of a tensor as numbers side by side, for copies that do not ask what it holds."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_memory(x: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory of a contiguous tensor, as [n] elements of ``dtype``."""
    assert x.is_contiguous()
    # A single element is contiguous with any stride, but only a stride of 1 is one of numbers.
    return x.as_strided((x.numel(),), (1,)).view(dtype)

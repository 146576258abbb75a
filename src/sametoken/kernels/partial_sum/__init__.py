"""Sums of the ranks' partial products: in rank order, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.kernels.partial_sum import reference


def partial_sum(partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``partials[0] + partials[1] + ... (+ bias)`` in fp32, in that order, rounded once.

    Element by element, so a row's bits depend on that row's partial products alone.

    Args:
        partials: [size, T, N] fp32, contiguous.
        dtype: of the result.
        bias: [N], of any floating dtype.

    Returns:
        [T, N].
    """
    if not partials.is_cuda:
        return reference.partial_sum(partials, dtype, bias)
    # Triton is part of CUDA builds of torch alone.
    from sametoken.kernels.partial_sum import triton

    return triton.partial_sum(partials, dtype, bias)

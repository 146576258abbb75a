"""Prompt lookup: find the end of a sequence earlier in it, and copy what came next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.kernels.ngram import reference


def select_lookup(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel that searches a slot's tokens on ``device``."""
    if device.type != "cuda":
        return reference.lookup
    # Triton is part of CUDA builds of torch alone.
    from sametoken.kernels.ngram.triton import lookup

    return lookup

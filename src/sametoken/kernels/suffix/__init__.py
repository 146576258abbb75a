"""Suffix decoding: earlier continuations of a sequence's end vote on what comes next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.kernels.suffix import reference


def select_search(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel that searches and votes on ``device``."""
    if device.type != "cuda":
        return reference.search
    # Triton is part of CUDA builds of torch alone.
    from sametoken.kernels.suffix.triton import search

    return search

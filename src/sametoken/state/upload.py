"""Non-blocking copies to the device and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[Sequence[int]]


def upload(values: Values, device: torch.device) -> Tensor:
    """An int64 tensor of ``values`` on ``device``.

    For a GPU it is staged in pinned memory, which the caching allocator does not reuse until the
    copy is done.
    """
    # NumPy reads lists in a third of the time.
    host = torch.from_numpy(np.array(values, dtype=np.int64))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; from a GPU it is made in stream order, into pinned memory."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of pinned host memory, made in stream order."""
    return tensor.to(device, non_blocking=True)

"""Values on their way to the device and back, without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[int] | Sequence[Sequence[int]]


def upload(values: Values, device: torch.device) -> Tensor:
    """An int64 tensor of ``values`` on ``device``.

    To a GPU it travels through pinned memory of its own, which the allocator keeps from
    reuse until the copy has been made.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    return host.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory. From a GPU it lands in stream order, in pinned memory."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """What ``to_host`` saved, back on the device in stream order."""
    return tensor.to(device, non_blocking=True)

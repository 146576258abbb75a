"""Facts about Hopper GPUs (H100, H200) that kernels are laid out for."""

from __future__ import annotations

import functools

import torch

#: Of an H100 or H200. Other chips get the same choices of tiles, with the same bits.
MULTIPROCESSORS = 132

#: Bytes of shared memory that a program can have.
SHARED_MEMORY = 227 << 10


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9

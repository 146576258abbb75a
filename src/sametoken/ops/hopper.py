"""Facts about Hopper GPUs (H100, H200) that kernels are laid out for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Of an H100 or H200. Other chips get the same choices of tiles, with the same bits.
MULTIPROCESSORS = 132

#: Bytes of shared memory that a program can have.
SHARED_MEMORY = 227 << 10


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory per program on the tensor's GPU; Hopper's for tensors elsewhere."""
    return _memory_of(x.get_device()) if x.is_cuda else SHARED_MEMORY


def shared_memory_of_device() -> int:
    """Bytes of shared memory per program on the current GPU; Hopper's where there is none."""
    return _memory_of(torch.cuda.current_device()) if torch.cuda.is_available() else SHARED_MEMORY


def has_hoppers_memory(x: Tensor) -> bool:
    """Whether programs on the tensor's GPU can have as much shared memory as on a Hopper."""
    return shared_memory(x) >= SHARED_MEMORY


@functools.cache
def _memory_of(device: int) -> int:
    # Only CUDA builds of torch come with Triton.
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])

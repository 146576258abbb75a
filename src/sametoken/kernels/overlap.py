"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A kernel launched so must call ``wait_for_earlier`` before it touches memory that another
kernel writes. As every kernel of a chain waits for the whole of the one before, the chain
stays in order. One that waits and releases nothing early is overtaken by none: what came
before it, and what it wrote, kernels after it may read before they wait.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

_HOPPER = (9, 0)


@triton.jit
def release_next(OVERLAP: tl.constexpr):
    """Let the next kernel be set up; ``wait`` follows."""
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until all earlier kernels have finished."""
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Let the next kernel be set up, then wait until all earlier ones have finished."""
    release_next(OVERLAP)
    wait(OVERLAP)


def overlapped(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that waits, for the device that holds ``tensor``."""
    if tensor.is_cuda and _can_overlap(tensor.get_device()):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def _can_overlap(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _HOPPER

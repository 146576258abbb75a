"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A kernel launched so must call ``gdc_launch_and_wait`` before it touches memory that another
kernel writes. As every kernel of a chain waits for the whole of the one before, the chain
stays in order. One that waits and releases nothing early is overtaken by none: what came
before it, and what it wrote, kernels after it may read before they wait. So do the writers of
``AttentionRows``, whose readers are many: where rows stand is settled before any layer begins.
So does ``plan_runs``, behind which recurrent states and the rows that slots hold may be read
(tests/unit/ops/test_pdl.py).
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
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel be set up; ``wait`` follows."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have finished."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def gdc_wait_once(PDL: tl.constexpr):
    """The wait of programs with nothing to do: one that waits keeps the chain in order."""
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        gdc_wait(PDL)


@triton.jit
def gdc_launch_and_wait(PDL: tl.constexpr):
    """Let the next kernel be set up, then wait until all earlier ones have finished."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)


@triton.jit
def prefetch_l2(at, BYTES: tl.constexpr):
    """Ask L2 for BYTES from each of these addresses on, [...] int64; both multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .b64 source; cvta.to.global.u64 source, $1; "
        f"cp.async.bulk.prefetch.L2.global [source], {BYTES}; mov.u32 $0, 0; }}",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_options(tensor: Tensor, early: bool = True) -> dict[str, bool]:
    """Launch options of a kernel that waits, for the device that holds ``tensor``.

    Args:
        tensor: on the device.
        early: whether it is set up while the kernel before it runs. The one after it is anyway.
    """
    return {"PDL": True, "launch_pdl": early} if supports_pdl(tensor) else {"PDL": False}


def supports_pdl(tensor: Tensor) -> bool:
    """Whether kernels can start early on the device that holds ``tensor``."""
    return tensor.is_cuda and _starts_early(tensor.get_device())


@functools.cache
def _starts_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _HOPPER

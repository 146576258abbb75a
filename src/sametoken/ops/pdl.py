"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

A kernel launched this way must call ``gdc_launch_and_wait`` before it touches memory that another
kernel writes. Every kernel waits for the whole one before it, so a chain stays in order.

A kernel that waits and never triggers early is a barrier: later kernels may read what was written
up to it without waiting. The writers of ``AttentionRows`` are barriers, so layers read positions
early; so is ``plan_runs``, after which recurrent states and pending rows may be read early
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

from sametoken.ops.triton_versions import FUSED

_HOPPER = (9, 0)


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start; it still has to wait."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have finished."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def gdc_wait_once(PDL: tl.constexpr):
    """Wait in one program of the grid only: enough to keep the chain in order."""
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        gdc_wait(PDL)


@triton.jit
def gdc_launch_and_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait until all earlier ones have finished."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)


@triton.jit
def prefetch_l2(at, BYTES: tl.constexpr):
    """Prefetch BYTES at each address, [...] int64, into L2; both are multiples of 16."""
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
    """Launch options of a kernel that calls ``gdc_wait``, and ``FUSED``.

    Args:
        tensor: on the device of the launch.
        early: start while the kernel before it runs. The kernel after it may start early anyway.
    """
    pdl = {"PDL": True, "launch_pdl": early} if supports_pdl(tensor) else {"PDL": False}
    return FUSED | pdl


def supports_pdl(tensor: Tensor) -> bool:
    """Whether the device of ``tensor`` has programmatic dependent launch."""
    return tensor.is_cuda and _has_pdl(tensor.get_device())


@functools.cache
def _has_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _HOPPER

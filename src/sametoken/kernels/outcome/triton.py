"""Packing a verdict at fixed shapes, in one launch."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.overlap import overlapped, wait_for_earlier

_COUNTS = tl.constexpr(4)


@triton.jit
def _pack_kernel(
    step_ids,  # [B]
    num_drafts,  # [B]
    num_accepted,  # [B]
    faults,  # [B]
    tokens,  # [B, W]
    out,  # [B, 4 + W]
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0).to(tl.int64)
    out += plan_row * (_COUNTS + W)
    tl.store(out, tl.load(step_ids + plan_row))
    tl.store(out + 1, tl.load(num_drafts + plan_row))
    tl.store(out + 2, tl.load(num_accepted + plan_row))
    tl.store(out + 3, tl.load(faults + plan_row))
    row = tl.arange(0, BLOCK)
    token = tl.load(tokens + plan_row * W + row, row < W, other=0)
    tl.store(out + _COUNTS + row, token, row < W)


def pack(
    step_ids: Tensor, num_drafts: Tensor, num_accepted: Tensor, faults: Tensor, tokens: Tensor
) -> Tensor:
    """[B, 4 + W] int64: step id, drafts, accepted drafts and fault, then the window's tokens.

    Args:
        step_ids, num_drafts, num_accepted, faults: [B] int64, contiguous.
        tokens: [B, W] int64, contiguous.
    """
    columns = (step_ids, num_drafts, num_accepted, faults, tokens)
    assert all(column.is_contiguous() for column in columns)
    batch, window = tokens.shape
    out = tokens.new_empty(batch, 4 + window)
    if batch:
        block = triton.next_power_of_2(window)
        _pack_kernel[(batch,)](
            *columns, out, W=window, BLOCK=block, num_warps=1, **overlapped(tokens)
        )
    return out

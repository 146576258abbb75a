"""Synthetic acceptance in Triton: one small kernel, so that a measured step stays what it is."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.acceptance import reference
from sametoken.kernels.overlap import overlapped, wait_for_earlier

_STEP = tl.constexpr(reference.STEP)
_FACTOR_30 = tl.constexpr(reference.FACTOR_30)
_FACTOR_27 = tl.constexpr(reference.FACTOR_27)


@triton.jit
def uniform(
    seed,  # int64
    position,  # int64
):
    """fp32 in [0, 1), as ``reference.uniform``."""
    word = seed + (position + 1) * _STEP
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _FACTOR_30
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _FACTOR_27
    return ((word >> 40) & 0xFFFFFF).to(tl.float32) * 2.0**-24


@triton.jit
def _accepted_kernel(
    rates,  # [K]
    seeds,  # [B]
    positions,  # [B]
    num_drafts,  # [B]
    num_accepted,  # [B]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK)
    noise = uniform(tl.load(seeds + row), tl.load(positions + row) + draft)
    offered = tl.load(num_drafts + row)
    hit = (draft < offered) & (noise < tl.load(rates + draft, draft < K, other=0.0))
    first_miss = tl.min(tl.where(hit, BLOCK, draft), axis=0)
    tl.store(num_accepted + row, tl.minimum(first_miss.to(tl.int64), offered))


def accepted(rates: Tensor, seeds: Tensor, positions: Tensor, num_drafts: Tensor) -> Tensor:
    """As ``reference.accepted``, with equal results; every tensor contiguous, on one device."""
    num_accepted = torch.empty_like(num_drafts)
    k = rates.shape[0]
    assert all(tensor.is_contiguous() for tensor in (rates, seeds, positions, num_drafts))
    _accepted_kernel[(num_drafts.shape[0],)](
        rates, seeds, positions, num_drafts, num_accepted,
        K=k, BLOCK=triton.next_power_of_2(k), num_warps=1, **overlapped(rates),
    )  # fmt: skip
    return num_accepted

"""Verify, commit and publish, a program for each request. Contracts: ``ops.StepOps``."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.overlap import overlapped, wait_for_earlier
from sametoken.kernels.step.triton_rows import commit_row, verify_row
from sametoken.kernels.step.types import (
    Chances,
    CommittedLengths,
    Sequences,
    StepInputs,
    VerifyResult,
)

_KEYS_AT_A_TIME = 2048


@triton.jit
def _verify_kernel(
    keys,  # [L, NUM_TILES]
    sampled_token_ids,  # [L]
    window_starts,  # [B + 1]
    num_drafts,  # [B]
    rates,  # [K], or None: drafts are judged
    seeds,  # [S], or None
    slots,  # [B]
    num_tokens,  # [B]
    tokens,  # [L], written, as all below
    num_accepted,  # [B]
    next_tokens,  # [B]
    faults,  # [B]
    NUM_TILES: tl.constexpr,
    W_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(window_starts + request), tl.load(window_starts + request + 1)
    drafts = tl.load(num_drafts + request)
    chances = None
    if rates is not None:
        seed = tl.load(seeds + tl.load(slots + request))
        chances = (rates, seed, tl.load(num_tokens + request))
    accepted, next_token, fault = verify_row(
        keys + first * NUM_TILES, chances, (sampled_token_ids + first, stop - first, drafts),
        tokens + first, NUM_TILES, W_BLOCK, TILE_BLOCK,
    )  # fmt: skip
    tl.store(num_accepted + request, accepted)
    tl.store(next_tokens + request, next_token)
    tl.store(faults + request, fault)


@triton.jit
def _commit_kernel(
    num_accepted,  # [B]
    next_tokens,  # [B]
    num_query,  # [B]
    slots,  # [B]
    samples,  # [B] bool
    row_starts,  # [B + 1]
    row_token_ids,  # [T]
    step_num_tokens,  # [B]
    step_num_computed,  # [B]
    token_ids,  # [S, max_len]
    num_tokens,  # [S]
    num_computed,  # [S]
    new_num_tokens,  # [B]
    new_num_computed,  # [B]
    token_stride,
    reserved_slot,
    W_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index)
    query = tl.where(slot == reserved_slot, 0, tl.load(num_query + index))
    request = (index, slot, query, tl.load(samples + index) != 0)
    verdict = (tl.load(num_accepted + index), tl.load(next_tokens + index))
    before = (tl.load(step_num_tokens + index), tl.load(step_num_computed + index))
    draft_tokens = row_token_ids + tl.load(row_starts + index) + query
    commit_row(
        request, verdict, before, draft_tokens, token_ids, num_tokens, num_computed,
        new_num_tokens, new_num_computed, token_stride, W_BLOCK,
    )  # fmt: skip


@triton.jit
def _publish_kernel(
    slots,  # [B]
    samples,  # [B] bool
    new_draft_ids,  # [B, K]
    new_num_drafts,  # [B]
    draft_ids,  # [S, K], written
    num_drafts,  # [S], written
    draft_stride,
    reserved_slot,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    live = slot != reserved_slot
    count = tl.where(tl.load(samples + request) != 0, tl.load(new_num_drafts + request), 0)
    tl.store(num_drafts + slot, count, live)
    index = tl.arange(0, BLOCK)
    draft = tl.load(new_draft_ids + request * K + index, index < K, other=0)
    tl.store(draft_ids + slot * draft_stride + index, draft, live & (index < K))


def verify(keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
    """See ``StepOps.verify``."""
    batch, num_tiles, token_ids = x.slots.shape[0], keys.shape[1], x.sampled.token_ids
    rates, seeds = (None, None) if chances is None else (chances.rates, chances.seeds)
    assert keys.is_contiguous()
    verdict = VerifyResult(
        torch.empty_like(token_ids), *(x.slots.new_empty(batch) for _ in range(3))
    )
    window = triton.next_power_of_2(x.max_num_drafts + 1)
    tiles = min(triton.next_power_of_2(num_tiles), max(_KEYS_AT_A_TIME // window, 1))
    _verify_kernel[(batch,)](
        keys,
        token_ids,
        x.window_starts,
        x.num_drafts,
        rates,
        seeds,
        x.slots,
        x.num_tokens,
        verdict.tokens,
        verdict.num_accepted,
        verdict.next_token,
        verdict.faults,
        NUM_TILES=num_tiles,
        W_BLOCK=window,
        TILE_BLOCK=tiles,
        num_warps=4,
        **overlapped(keys),
    )
    return verdict


def commit(
    sequences: Sequences, x: StepInputs, num_accepted: Tensor, next_token: Tensor
) -> CommittedLengths:
    """See ``StepOps.commit``."""
    lengths = CommittedLengths(torch.empty_like(x.num_tokens), torch.empty_like(x.num_tokens))
    _commit_kernel[(x.slots.shape[0],)](
        num_accepted,
        next_token,
        x.num_query,
        x.slots,
        x.samples,
        x.row_starts,
        x.token_ids,
        x.num_tokens,
        x.num_computed,
        sequences.token_ids,
        sequences.num_tokens,
        sequences.num_computed,
        lengths.num_tokens,
        lengths.num_computed,
        sequences.token_ids.stride(0),
        sequences.reserved_slot,
        W_BLOCK=triton.next_power_of_2(sequences.max_num_drafts + 1),
        num_warps=1,
        **overlapped(x.slots),
    )
    return lengths


def publish(sequences: Sequences, x: StepInputs, draft_ids: Tensor, num_drafts: Tensor) -> None:
    """See ``StepOps.publish``."""
    batch, k = draft_ids.shape
    assert draft_ids.is_contiguous()
    assert k == sequences.max_num_drafts
    if not k:
        return
    _publish_kernel[(batch,)](
        x.slots,
        x.samples,
        draft_ids,
        num_drafts,
        sequences.draft_ids,
        sequences.num_drafts,
        sequences.draft_ids.stride(0),
        sequences.reserved_slot,
        K=k,
        BLOCK=triton.next_power_of_2(k),
        num_warps=1,
        **overlapped(x.slots),
    )

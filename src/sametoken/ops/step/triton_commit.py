"""Verify, commit and publish in Triton, with one program per request."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.sampling.sample_triton import has_nan, has_no_valid_token, token_of
from sametoken.ops.step import reference, types
from sametoken.ops.step.types import Chances, CommittedLengths, Sequences, StepInputs, VerifyResult

SOUND = tl.constexpr(types.SOUND)
HAS_NAN = tl.constexpr(types.HAS_NAN)
NO_TOKEN = tl.constexpr(types.NO_TOKEN)
_STEP = tl.constexpr(reference.STEP)
_FACTOR_30 = tl.constexpr(reference.FACTOR_30)
_FACTOR_27 = tl.constexpr(reference.FACTOR_27)


@triton.jit
def uniform(
    seed,  # int64
    position,  # int64
):
    """See ``reference.uniform``."""
    word = seed + (position + 1) * _STEP
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _FACTOR_30
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _FACTOR_27
    return ((word >> 40) & 0xFFFFFF).to(tl.float32) * 2.0**-24


_KEYS_AT_A_TIME = 2048


@triton.jit
def _verify_kernel(
    keys,  # [L, NUM_TILES]
    sampled_token_ids,  # [L]
    window_starts,  # [B + 1]
    num_drafts,  # [B]
    rates,  # [K], or None: drafts are verified
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
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    request = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(window_starts + request), tl.load(window_starts + request + 1)
    drafts, num_rows = tl.load(num_drafts + request), stop - start
    keys += start * NUM_TILES
    row = tl.arange(0, W_BLOCK)
    best = tl.full((W_BLOCK,), -(2**63), tl.int64)
    for first in range(0, NUM_TILES, TILE_BLOCK):
        tile = first + tl.arange(0, TILE_BLOCK)[None, :]
        inside = (row[:, None] < num_rows) & (tile < NUM_TILES)
        at = row[:, None] * NUM_TILES + tile
        lowest = tl.full((W_BLOCK, TILE_BLOCK), -(2**63), tl.int64)
        best = tl.maximum(best, tl.max(tl.load(keys + at, inside, other=lowest), axis=1))
    token = token_of(best)

    is_draft = row < drafts
    draft = tl.load(sampled_token_ids + start + 1 + row, is_draft, other=0)
    matches = tl.min(tl.where(is_draft & (token == draft), W_BLOCK, row), axis=0)
    live = (row <= drafts) & (row < num_rows)
    fault = tl.where(has_no_valid_token(best), NO_TOKEN, tl.where(has_nan(best), HAS_NAN, SOUND))
    fault = tl.where(live, fault, SOUND)
    # A row with a fault waits until it is a window's first.
    end = tl.where((fault != SOUND) & (row > 0), row - 1, W_BLOCK)
    matches = tl.minimum(matches, tl.min(end, axis=0))
    fault = tl.max(tl.where(row == 0, fault, SOUND), axis=0)
    if rates is not None:
        seed = tl.load(seeds + tl.load(slots + request))
        drawn = uniform(seed, tl.load(num_tokens + request) + row)
        hit = drawn < tl.load(rates + row, is_draft, other=0.0)
        matches = tl.min(tl.where(is_draft & hit, W_BLOCK, row), axis=0)

    verified = (num_rows > 0) & (fault == SOUND)
    accepted = tl.where(verified, matches, 0)
    next_token = tl.sum(tl.where(row == accepted, token, 0), axis=0)
    # A draft accepted by chance is emitted in place of the target's own token.
    tl.store(tokens + start + row, tl.where(row < accepted, draft, token), row < num_rows)
    tl.store(num_accepted + request, accepted.to(tl.int64))
    tl.store(next_tokens + request, tl.where(verified, next_token, 0))
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
    token_ids,  # [S, max_len], written, as all below
    num_tokens,  # [S]
    num_computed,  # [S]
    new_num_tokens,  # [B]
    new_num_computed,  # [B]
    token_stride,
    reserved_slot,
    W_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    slot, accepted = tl.load(slots + index), tl.load(num_accepted + index)
    query = tl.where(slot == reserved_slot, 0, tl.load(num_query + index))
    sampled = tl.load(samples + index) != 0
    tokens_before = tl.load(step_num_tokens + index)
    emitted = tl.where((query > 0) & sampled, accepted + 1, 0)
    computed_after = tl.load(step_num_computed + index) + query + accepted
    tl.store(new_num_tokens + index, tokens_before + emitted)
    tl.store(new_num_computed + index, computed_after)
    tl.store(num_tokens + slot, tokens_before + emitted, query > 0)
    tl.store(num_computed + slot, computed_after, query > 0)

    row = tl.arange(0, W_BLOCK)
    drafts = row_token_ids + tl.load(row_starts + index) + query
    draft = tl.load(drafts + row, row < emitted - 1, other=0)
    token = tl.where(row < accepted, draft, tl.load(next_tokens + index))
    tl.store(token_ids + slot * token_stride + tokens_before + row, token, row < emitted)


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
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
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
    verified = VerifyResult(
        torch.empty_like(token_ids), *(x.slots.new_empty(batch) for _ in range(3))
    )
    window = triton.next_power_of_2(x.num_speculative_tokens + 1)
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
        verified.tokens,
        verified.num_accepted,
        verified.next_token,
        verified.faults,
        NUM_TILES=num_tiles,
        W_BLOCK=window,
        TILE_BLOCK=tiles,
        num_warps=4,
        **pdl_options(keys),
    )
    return verified


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
        W_BLOCK=triton.next_power_of_2(sequences.num_speculative_tokens + 1),
        num_warps=1,
        **pdl_options(x.slots),
    )
    return lengths


def publish(sequences: Sequences, x: StepInputs, draft_ids: Tensor, num_drafts: Tensor) -> None:
    """See ``StepOps.publish``."""
    batch, k = draft_ids.shape
    assert draft_ids.is_contiguous()
    assert k == sequences.num_speculative_tokens
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
        **pdl_options(x.slots),
    )

"""What one program does for its plan row: judge the window, make accepted tokens true."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.kernels import outcome
from sametoken.kernels.acceptance.triton import uniform
from sametoken.kernels.sampling.triton import is_poisoned, is_stuck, token_of

SOUND = tl.constexpr(outcome.SOUND)
HAS_NAN = tl.constexpr(outcome.HAS_NAN)
NO_TOKEN = tl.constexpr(outcome.NO_TOKEN)


@triton.jit
def judge_row(
    plan_row,
    keys,  # [B, W, NUM_TILES]
    rates,  # [K], or None: drafts are judged
    seeds,  # [S], or None
    query,  # scalar, num_query of the plan row
    drafts,  # scalar, num_drafts of the plan row
    slots,  # [B]
    staged_token_ids,  # [B, R]
    staged_num_tokens,  # [B]
    tokens,  # [B, W], written
    R: tl.constexpr,
    W: tl.constexpr,
    NUM_TILES: tl.constexpr,
    W_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Scalars num_accepted, next_token and fault of one window; stores its tokens.

    A draft before a row that has no token left counts as the mismatch, as in
    ``verification.keyed``.
    """
    row = tl.arange(0, W_BLOCK)
    best = tl.full((W_BLOCK,), -(2**63), tl.int64)
    for first in range(0, NUM_TILES, TILE_BLOCK):
        tile = first + tl.arange(0, TILE_BLOCK)[None, :]
        inside = (row[:, None] < W) & (tile < NUM_TILES)
        at = (plan_row * W + row[:, None]) * NUM_TILES + tile
        lowest = tl.full((W_BLOCK, TILE_BLOCK), -(2**63), tl.int64)
        best = tl.maximum(best, tl.max(tl.load(keys + at, inside, other=lowest), axis=1))
    token = token_of(best)

    is_draft = row < drafts
    draft = tl.load(staged_token_ids + plan_row * R + query + row, is_draft, other=0)
    matches = tl.min(tl.where(is_draft & (token == draft), W_BLOCK, row), axis=0)
    stuck = (row <= drafts) & is_stuck(best)
    matches = tl.minimum(matches, tl.min(tl.where(stuck & (row > 0), row - 1, W_BLOCK), axis=0))
    fault = tl.where(stuck, NO_TOKEN, tl.where(is_poisoned(best), HAS_NAN, SOUND))
    fault = tl.max(tl.where((row <= matches) & (query > 0), fault, SOUND), axis=0)
    if rates is not None:
        seed = tl.load(seeds + tl.load(slots + plan_row))
        noise = uniform(seed, tl.load(staged_num_tokens + plan_row) + row)
        hit = noise < tl.load(rates + row, is_draft, other=0.0)
        matches = tl.min(tl.where(is_draft & hit, W_BLOCK, row), axis=0)

    judged = (query > 0) & (fault == SOUND)
    accepted = tl.where(judged, matches, 0)
    next_token = tl.sum(tl.where(row == accepted, token, 0), axis=0)
    # A draft accepted by chance is emitted, whatever the target's own token is.
    tl.store(tokens + plan_row * W + row, tl.where(row < accepted, draft, token), row < W)
    return accepted.to(tl.int64), tl.where(judged, next_token, 0), fault


@triton.jit
def commit_row(
    plan_row,
    accepted,  # scalar
    next_token,  # scalar
    query,  # scalar
    slots,  # [B]
    samples,  # [B] bool
    staged_token_ids,  # [B, R]
    staged_num_tokens,  # [B]
    staged_num_computed,  # [B]
    token_ids,  # [S, max_len], written
    num_tokens,  # [S], written
    num_computed,  # [S], written
    new_num_tokens,  # [B], written
    new_num_computed,  # [B], written
    token_stride,
    R: tl.constexpr,
    W_BLOCK: tl.constexpr,
):
    """Make one plan row's accepted tokens true."""
    slot = tl.load(slots + plan_row)
    sampled = (query > 0) & (tl.load(samples + plan_row) != 0)
    emitted = tl.where(sampled, accepted + 1, 0)
    tokens_before = tl.load(staged_num_tokens + plan_row)
    tokens_after = tokens_before + emitted
    computed_after = tl.load(staged_num_computed + plan_row) + query + accepted
    tl.store(new_num_tokens + plan_row, tokens_after)
    tl.store(new_num_computed + plan_row, computed_after)
    tl.store(num_tokens + slot, tokens_after, query > 0)
    tl.store(num_computed + slot, computed_after, query > 0)

    row = tl.arange(0, W_BLOCK)
    draft = tl.load(staged_token_ids + plan_row * R + query + row, row < emitted - 1, other=0)
    token = tl.where(row < accepted, draft, next_token)
    tl.store(token_ids + slot * token_stride + tokens_before + row, token, row < emitted)

"""What one program does for its request: verify the window, make accepted tokens true."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.kernels.sampling.triton import is_poisoned, is_stuck, token_of
from sametoken.kernels.step import reference, types

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
    """fp32 in [0, 1), as ``reference.uniform``."""
    word = seed + (position + 1) * _STEP
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _FACTOR_30
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _FACTOR_27
    return ((word >> 40) & 0xFFFFFF).to(tl.float32) * 2.0**-24


@triton.jit
def verify_row(
    keys,  # [rows of the window, NUM_TILES]
    chances,  # rates [K], the request's seed and num_tokens; or None: drafts are judged
    window,  # tokens of its rows [rows], how many rows it has, drafts among them
    tokens,  # [rows of the window], written
    NUM_TILES: tl.constexpr,
    W_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Scalars num_accepted, next_token and fault of one window; stores its tokens."""
    token_ids, num_rows, drafts = window
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
    draft = tl.load(token_ids + 1 + row, is_draft, other=0)
    matches = tl.min(tl.where(is_draft & (token == draft), W_BLOCK, row), axis=0)
    live = (row <= drafts) & (row < num_rows)
    stuck = live & is_stuck(best)
    matches = tl.minimum(matches, tl.min(tl.where(stuck & (row > 0), row - 1, W_BLOCK), axis=0))
    fault = tl.where(stuck, NO_TOKEN, tl.where(is_poisoned(best), HAS_NAN, SOUND))
    fault = tl.max(tl.where(live & (row <= matches), fault, SOUND), axis=0)
    if chances is not None:
        rates, seed, num_tokens = chances
        hit = uniform(seed, num_tokens + row) < tl.load(rates + row, is_draft, other=0.0)
        matches = tl.min(tl.where(is_draft & hit, W_BLOCK, row), axis=0)

    judged = (num_rows > 0) & (fault == SOUND)
    accepted = tl.where(judged, matches, 0)
    next_token = tl.sum(tl.where(row == accepted, token, 0), axis=0)
    # A draft accepted by chance is emitted, whatever the target's own token is.
    tl.store(tokens + row, tl.where(row < accepted, draft, token), row < num_rows)
    return accepted.to(tl.int64), tl.where(judged, next_token, 0), fault


@triton.jit
def commit_row(
    request,  # index, slot, num_query, samples
    verdict,  # num_accepted, next_token
    before,  # num_tokens, num_computed
    draft_tokens,  # [num_accepted], pointer to the first draft's
    token_ids,  # [S, max_len], written
    num_tokens,  # [S], written
    num_computed,  # [S], written
    new_num_tokens,  # [B], written
    new_num_computed,  # [B], written
    token_stride,
    W_BLOCK: tl.constexpr,
):
    """Make one request's accepted tokens true."""
    index, slot, query, samples = request
    accepted, next_token = verdict
    tokens_before, computed_before = before
    emitted = tl.where((query > 0) & samples, accepted + 1, 0)
    tokens_after = tokens_before + emitted
    computed_after = computed_before + query + accepted
    tl.store(new_num_tokens + index, tokens_after)
    tl.store(new_num_computed + index, computed_after)
    tl.store(num_tokens + slot, tokens_after, query > 0)
    tl.store(num_computed + slot, computed_after, query > 0)

    row = tl.arange(0, W_BLOCK)
    draft = tl.load(draft_tokens + row, row < emitted - 1, other=0)
    token = tl.where(row < accepted, draft, next_token)
    tl.store(token_ids + slot * token_stride + tokens_before + row, token, row < emitted)

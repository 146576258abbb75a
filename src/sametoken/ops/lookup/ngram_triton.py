"""N-gram prompt lookup in Triton: search tiles of a slot's tokens, then copy the best match."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_BLOCK = 1024


@triton.jit
def _search_kernel(
    token_ids,  # [S, max_len]
    slots,  # [B]
    num_tokens,  # [B]
    ranks,  # [B, NUM_TILES]
    token_stride,
    MIN_LENGTH: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
    MAX_LEN: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank each index as the end of an occurrence: longest first, then earliest; -1 is none."""
    gdc_launch_and_wait(PDL)
    batch_row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last = tl.load(num_tokens + batch_row) - 1
    best = last * 0 - 1
    if tile * BLOCK < last:
        tokens = token_ids + tl.load(slots + batch_row) * token_stride
        end = tile * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        matches = end < last
        matches &= tl.load(tokens + end, matches, other=0) == tl.load(tokens + last)
        if tl.max(matches.to(tl.int32), axis=0) != 0:
            length = matches.to(tl.int64)
            for back in range(1, MAX_LENGTH):
                matches &= end >= back
                # Lanes that still match have last > end >= back; the mask covers back > last.
                there = tl.load(tokens + last - back, last >= back, other=0)
                matches &= tl.load(tokens + end - back, matches, other=0) == there
                length += matches.to(tl.int64)
            rank = tl.where(length >= MIN_LENGTH, length * MAX_LEN + (MAX_LEN - 1 - end), -1)
            best = tl.max(rank, axis=0)
    tl.store(ranks + batch_row * NUM_TILES + tile, best)


@triton.jit
def _copy_kernel(
    token_ids,  # [S, max_len]
    slots,  # [B]
    num_tokens,  # [B]
    ranks,  # [B, NUM_TILES]
    draft_ids,  # [B, K]
    num_drafts,  # [B]
    token_stride,
    MAX_LEN: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    batch_row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.max(tl.load(ranks + batch_row * NUM_TILES + tile, tile < NUM_TILES, other=-1), axis=0)
    length = tl.load(num_tokens + batch_row)
    first = tl.where(best >= 0, MAX_LEN - best % MAX_LEN, length)
    tl.store(num_drafts + batch_row, tl.minimum(length - first, K))

    index = tl.arange(0, K_BLOCK)
    source = tl.maximum(tl.minimum(first + index, length - 1), 0)
    tokens = token_ids + tl.load(slots + batch_row) * token_stride
    draft = tl.load(tokens + source, index < K, other=0)
    tl.store(draft_ids + batch_row * K + index, draft, index < K)


def lookup(
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    *,
    min_length: int,
    max_length: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """See ``ngram.lookup``; k is at least 1."""
    assert token_ids.stride(1) == 1
    assert slots.is_contiguous()
    assert num_tokens.is_contiguous()
    batch, max_len = slots.shape[0], token_ids.shape[1]
    num_tiles = triton.cdiv(max_len, _BLOCK)
    ranks, draft_ids = slots.new_empty(batch, num_tiles), slots.new_empty(batch, k)
    num_drafts = slots.new_empty(batch)
    _search_kernel[(batch, num_tiles)](
        token_ids,
        slots,
        num_tokens,
        ranks,
        token_ids.stride(0),
        MIN_LENGTH=min_length,
        MAX_LENGTH=max_length,
        MAX_LEN=max_len,
        NUM_TILES=num_tiles,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(slots),
    )
    _copy_kernel[(batch,)](
        token_ids,
        slots,
        num_tokens,
        ranks,
        draft_ids,
        num_drafts,
        token_ids.stride(0),
        MAX_LEN=max_len,
        NUM_TILES=num_tiles,
        TILE_BLOCK=triton.next_power_of_2(num_tiles),
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        num_warps=1,
        **pdl_options(slots),
    )
    return draft_ids, num_drafts

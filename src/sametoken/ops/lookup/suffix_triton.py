"""Suffix search in Triton: rank groups of places, then let the best of them vote."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.lookup.suffix import GROUP, MAX_VOTERS, Earlier, Limits
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_BLOCK = 1024
#: Bytes of ranks at once: of 256 MiB of earlier texts a row has 17 MB.
_MOST_BYTES = 2**28


@triton.jit(do_not_specialize=["batch"])
def _rank_kernel(
    token_ids,  # [S, max_len]
    slots,  # [B]
    num_tokens,  # [B]
    texts,  # [R, W]
    text_lengths,  # [R]
    ranks,  # [B, TOTAL]
    batch,  # B
    token_stride,
    text_stride,
    SPAN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    OWN_TILES: tl.constexpr,
    TEXT_TILES: tl.constexpr,
    OWN_GROUPS: tl.constexpr,
    TEXT_GROUPS: tl.constexpr,
    TOTAL: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank one tile of places, of a row's own text or of an earlier one."""
    gdc_launch_and_wait(PDL)
    # All tiles on grid axis 0: the other axes are limited to 65535 programs.
    row, tile = (tl.program_id(0) % batch).to(tl.int64), tl.program_id(0) // batch
    length = tl.load(num_tokens + row)
    last = length - 1
    own = token_ids + tl.load(slots + row) * token_stride
    text, first_place, num_places = own, last * 0, last
    group, num_groups = tile * 0, tile * 0 + OWN_GROUPS
    start = tile * BLOCK
    if tile >= OWN_TILES:
        index = ((tile - OWN_TILES) // TEXT_TILES).to(tl.int64)
        start = (tile - OWN_TILES) % TEXT_TILES * BLOCK
        text = texts + index * text_stride
        first_place = MAX_LEN + index * WIDTH
        # Padding has no match in other texts either.
        num_places = tl.where(length > 0, tl.load(text_lengths + index) - 1, 0)
        group = (OWN_GROUPS + index * TEXT_GROUPS).to(tl.int32)
        num_groups = tile * 0 + TEXT_GROUPS
    end = start + tl.arange(0, BLOCK).to(tl.int64)
    matches = end < num_places
    final = tl.load(own + last, last >= 0, other=0)
    matches &= tl.load(text + end, matches, other=0) == final
    rank = end * 0 - 1
    if tl.max(matches.to(tl.int32), axis=0) != 0:
        here, size = matches, matches.to(tl.int64)
        for back in range(1, DEPTH):
            here &= (end >= back) & (last >= back)
            there = tl.load(own + last - back, last >= back, other=0)
            here &= tl.load(text + end - back, here, other=0) == there
            size += here.to(tl.int64)
        rank = tl.where(matches, size * SPAN + (SPAN - 1 - first_place - end), -1)
    best = tl.max(tl.reshape(rank, (BLOCK // GROUP, GROUP)), axis=1)
    within = start // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(ranks + row * TOTAL + group + within, best, within < num_groups)


@triton.jit
def _vote_kernel(
    token_ids,  # [S, max_len]
    slots,  # [B]
    num_tokens,  # [B]
    texts,  # [R, W]
    text_lengths,  # [R]
    best,  # [B, VOTERS]
    num_drafts,  # [DEPTH + 1]
    agreeing,  # [VOTERS + 1]
    drafted,  # [B, K]
    count,  # [B]
    token_stride,
    text_stride,
    SPAN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    VOTERS: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    voter = tl.arange(0, VOTERS)
    rank = tl.load(best + row * VOTERS + voter)
    longest = tl.max(rank, axis=0) // SPAN
    voting = (rank >= 0) & (rank // SPAN == longest)
    num_voters = tl.sum(voting.to(tl.int32), axis=0)
    most = tl.load(num_drafts + longest, num_voters > 0, other=0)
    needed = tl.load(agreeing + num_voters)

    place = SPAN - 1 - rank % SPAN
    is_own = place < MAX_LEN
    index = tl.where(voting & ~is_own, (place - MAX_LEN) // WIDTH, 0)
    first = tl.where(is_own, place, (place - MAX_LEN) % WIDTH) + 1
    limit = tl.load(num_tokens + row)
    limit = tl.where(is_own, limit, tl.load(text_lengths + index, voting & ~is_own, other=0))
    own = token_ids + tl.load(slots + row) * token_stride
    total = row * 0
    for i in range(K):
        there = voting & (first + i < limit)
        mine = tl.load(own + first + i, there & is_own, other=0)
        others = tl.load(texts + index * text_stride + first + i, there & ~is_own, other=0)
        token = tl.where(is_own, mine, others)
        same = (token[:, None] == token[None, :]) & there[:, None] & there[None, :]
        votes = tl.sum(same.to(tl.int32), axis=1)
        winner = tl.max(votes, axis=0)
        # The first voter decides a tie.
        leader = tl.min(tl.where(votes == winner, voter, VOTERS), axis=0)
        chosen = tl.sum(tl.where(voter == leader, token, 0), axis=0)
        goes_on = (total == i) & (i < most) & (winner >= needed)
        tl.store(drafted + row * K + i, tl.where(goes_on, chosen, 0))
        total += goes_on.to(tl.int64)
        voting = there & (token == chosen)
    tl.store(count + row, total)


def search(
    token_ids: Tensor, slots: Tensor, num_tokens: Tensor, *, earlier: Earlier, limits: Limits
) -> tuple[Tensor, Tensor]:
    """See ``suffix.search``."""
    texts = earlier.texts
    assert token_ids.stride(1) == texts.stride(1) == 1
    assert slots.is_contiguous()
    assert num_tokens.is_contiguous()
    batch, max_len, width = slots.shape[0], token_ids.shape[1], texts.shape[1]
    sizes = {"SPAN": max_len + texts.numel(), "MAX_LEN": max_len, "WIDTH": max(width, 1)}
    total = _num_groups(max_len, earlier)
    num_rows = max(1, _MOST_BYTES // (total * torch.int64.itemsize))
    parts = zip(slots.split(num_rows), num_tokens.split(num_rows), strict=True)
    best = torch.cat([_best(token_ids, *part, earlier, limits.depth, sizes) for part in parts])
    draft_ids, count = slots.new_empty(batch, limits.k), slots.new_empty(batch)
    _vote_kernel[(batch,)](
        token_ids,
        slots,
        num_tokens,
        texts,
        earlier.lengths,
        best,
        limits.num_drafts,
        limits.agreeing,
        draft_ids,
        count,
        token_ids.stride(0),
        texts.stride(0),
        VOTERS=MAX_VOTERS,
        K=limits.k,
        num_warps=1,
        **sizes,
        **pdl_options(slots),
    )
    return draft_ids, count


def _num_groups(max_len: int, earlier: Earlier) -> int:
    """Groups of places of a row's own text and of all earlier ones, and at least MAX_VOTERS."""
    num_texts, width = earlier.texts.shape
    num_groups: int = triton.cdiv(max_len, GROUP) + num_texts * triton.cdiv(width, GROUP)
    return max(num_groups, MAX_VOTERS)


def _best(
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    earlier: Earlier,
    depth: int,
    sizes: dict[str, int],
) -> Tensor:
    """[B, MAX_VOTERS] int64: ranks of the places that may vote, the best first; -1: none."""
    texts = earlier.texts
    batch, (num_texts, width), max_len = slots.shape[0], texts.shape, token_ids.shape[1]
    own_tiles, text_tiles = triton.cdiv(max_len, _BLOCK), triton.cdiv(width, _BLOCK)
    total = _num_groups(max_len, earlier)
    ranks = slots.new_full((batch, total), -1)
    _rank_kernel[(batch * (own_tiles + num_texts * text_tiles),)](
        token_ids,
        slots,
        num_tokens,
        texts,
        earlier.lengths,
        ranks,
        batch,
        token_ids.stride(0),
        texts.stride(0),
        OWN_TILES=own_tiles,
        TEXT_TILES=max(text_tiles, 1),
        OWN_GROUPS=triton.cdiv(max_len, GROUP),
        TEXT_GROUPS=triton.cdiv(width, GROUP),
        TOTAL=total,
        DEPTH=depth,
        GROUP=GROUP,
        BLOCK=_BLOCK,
        num_warps=4,
        **sizes,
        **pdl_options(slots),
    )
    return ranks.topk(MAX_VOTERS, dim=1).values

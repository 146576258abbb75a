"""The padded layout of a drafter's rows: one launch after a commit, one for each draft."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.draft_rows.layout import CatchUp, Chains
from sametoken.kernels.interface import AttentionRows
from sametoken.kernels.overlap import overlapped, wait, wait_for_earlier

_MAX_BLOCK = 256
_COPIED_ELEMENTS = 1024


@triton.jit
def _kv_slot(
    block_table,  # [S, max_blocks]
    slot,
    position,
    table_stride,
    block_size,
):
    """``block_id * block_size + offset`` of positions of slots."""
    entry = block_table + slot * table_stride + position // block_size
    return tl.load(entry) * block_size + position % block_size


@triton.jit
def _catch_up_kernel(
    slots,  # [B]
    start,  # [B]
    end,  # [B]
    samples,  # [B] bool
    token_ids,  # [S, max_len]
    block_table,  # [S, max_blocks]
    row_token_ids,  # [B, W], written, as all below
    row_positions,  # [B, W]
    row_slots,  # [B, W]
    row_kv_slots,  # [B, W]
    row_committed,  # [B, W] bool
    chain_last,  # [B]
    chain_positions,  # [B]
    chain_slots,  # [B]
    chain_kv_slots,  # [B]
    chain_committed,  # [B] bool
    chain_following,  # [B]
    token_stride,
    table_stride,
    reserved_slot,
    block_size,
    R: tl.constexpr,
    NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)  # And no release: this writes where rows stand.
    W: tl.constexpr = R + NEWEST
    plan_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + plan_row)
    first, after = tl.load(start + plan_row), tl.load(end + plan_row)
    sampled = tl.load(samples + plan_row) != 0
    stop = after
    if NEWEST:
        stop = after + sampled.to(tl.int64)
    if tl.program_id(1) == 0:
        position = tl.where(sampled, after, 0)
        chain_slot = tl.where(sampled, slot, reserved_slot)
        kv_slot = _kv_slot(block_table, chain_slot, position, table_stride, block_size)
        tl.store(chain_last + plan_row, plan_row * W + tl.maximum(stop - first - 1, 0))
        tl.store(chain_positions + plan_row, position)
        tl.store(chain_slots + plan_row, chain_slot)
        tl.store(chain_kv_slots + plan_row, kv_slot)
        tl.store(chain_committed + plan_row, position < 0)
        tl.store(chain_following + plan_row, position + 1)

    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < W
    # Rows beyond W are dead too, so that every address below is a valid one.
    live = inside & (first + row < stop)
    row_slot = tl.where(live, slot, reserved_slot)
    position = tl.where(live, first + row, 0)
    held = token_ids + row_slot * token_stride + position
    if not NEWEST:
        held += 1
    kv_slot = _kv_slot(block_table, row_slot, position, table_stride, block_size)
    flat = plan_row * W + row
    tl.store(row_token_ids + flat, tl.load(held), inside)
    tl.store(row_positions + flat, position, inside)
    tl.store(row_slots + flat, row_slot, inside)
    tl.store(row_kv_slots + flat, kv_slot, inside)
    tl.store(row_committed + flat, live & (first + row < after), inside)


@triton.jit
def _advance_kernel(
    slots,  # [B]
    following,  # [B]
    block_table,  # [S, max_blocks]
    kv_slots,  # [B], written
    new_following,  # [B], written
    count,  # B
    table_stride,
    block_size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)  # And no release: this writes where rows stand.
    chain = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = chain < count
    slot = tl.load(slots + chain, inside, other=0)
    position = tl.load(following + chain, inside, other=0)
    kv_slot = _kv_slot(block_table, slot, position, table_stride, block_size)
    tl.store(kv_slots + chain, kv_slot, inside)
    tl.store(new_following + chain, position + 1, inside)


@triton.jit
def _take_kernel(
    rows,  # [R]
    states,  # [T, WIDTH]
    taken,  # [R, WIDTH], written
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = tl.load(rows + place) * WIDTH + columns
    target = place * WIDTH + columns
    tl.store(taken + target, tl.load(states + source, inside), inside)


@triton.jit
def _stack_kernel(
    tokens,  # K of [B]
    samples,  # [B] bool
    drafted,  # [B, K], written
    counts,  # [B], written
    num_rows,  # B
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_earlier(OVERLAP)
    plan_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = plan_row < num_rows
    for i in tl.static_range(K):
        tl.store(drafted + plan_row * K + i, tl.load(tokens[i] + plan_row, inside), inside)
    sampled = tl.load(samples + plan_row, inside, other=0) != 0
    tl.store(counts + plan_row, sampled.to(tl.int64) * K, inside)


def catch_up(
    sequences: Any,
    slots: Tensor,
    start: Tensor,
    end: Tensor,
    samples: Tensor,
    *,
    rows_per_plan_row: int,
    with_newest: bool,
) -> CatchUp:
    """Live rows and chains in one launch; arguments and results as in ``reference.catch_up``."""
    batch, width = slots.shape[0], rows_per_plan_row + with_newest
    # Each by itself: a part of a larger tensor may be unaligned, and cost a compilation more.
    token_ids, positions, row_slots, kv_slots = (slots.new_empty(batch * width) for _ in range(4))
    last, chain_positions, chain_slots, chain_kv_slots, following = (
        slots.new_empty(batch) for _ in range(5)
    )
    committed = slots.new_empty(batch * width, dtype=torch.bool)
    chain_committed = slots.new_empty(batch, dtype=torch.bool)
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    _catch_up_kernel[(batch, triton.cdiv(width, block))](
        slots,
        start,
        end,
        samples,
        sequences.token_ids,
        sequences.block_table,
        token_ids,
        positions,
        row_slots,
        kv_slots,
        committed,
        last,
        chain_positions,
        chain_slots,
        chain_kv_slots,
        chain_committed,
        following,
        sequences.token_ids.stride(0),
        sequences.block_table.stride(0),
        sequences.reserved_slot,
        sequences.block_size,
        R=rows_per_plan_row,
        NEWEST=int(with_newest),
        BLOCK=block,
        num_warps=min(max(block // 32, 1), 4),
        **overlapped(slots),
    )
    table = sequences.block_table
    chain_rows = AttentionRows(
        chain_positions, chain_slots, chain_kv_slots, table, 1, chain_committed
    )
    rows = AttentionRows(positions, row_slots, kv_slots, table, width, committed)
    return CatchUp(token_ids, rows, None, Chains(None, last, chain_rows, following))


def advanced(sequences: Any, chains: Chains) -> Chains:
    """The chains one position on, in one launch."""
    rows, table = chains.rows, sequences.block_table
    count = rows.slots.shape[0]
    kv_slots, following = torch.empty_like(rows.slots), torch.empty_like(rows.slots)
    block = min(triton.next_power_of_2(count), _MAX_BLOCK)
    _advance_kernel[(triton.cdiv(count, block),)](
        rows.slots,
        chains.following,
        table,
        kv_slots,
        following,
        count,
        table.stride(0),
        sequences.block_size,
        BLOCK=block,
        num_warps=min(max(block // 32, 1), 4),
        **overlapped(rows.slots),
    )
    advanced_rows = AttentionRows(chains.following, rows.slots, kv_slots, table, 1, rows.committed)
    return Chains(chains.owner, chains.last, advanced_rows, following)


def take(rows: Tensor, states: Tensor) -> Tensor:
    """Copies of the given rows, [R] int64, of [T, W]."""
    count, width = rows.shape[0], states.shape[1]
    assert rows.is_contiguous()
    assert states.is_contiguous()
    taken = states.new_empty(count, width)
    if count:
        _take_kernel[(count, triton.cdiv(width, _COPIED_ELEMENTS))](
            rows,
            states,
            taken,
            WIDTH=width,
            BLOCK=_COPIED_ELEMENTS,
            num_warps=4,
            **overlapped(rows),
        )
    return taken


def stacked(tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts and their number in one launch; as ``reference.stacked``, with equal results."""
    batch, k = samples.shape[0], len(tokens)
    assert all(column.is_contiguous() for column in (*tokens, samples))
    drafted, counts = tokens[0].new_empty(batch, k), tokens[0].new_empty(batch)
    block = min(triton.next_power_of_2(batch), _MAX_BLOCK)
    _stack_kernel[(triton.cdiv(batch, block),)](
        tuple(tokens),
        samples,
        drafted,
        counts,
        batch,
        K=k,
        BLOCK=block,
        num_warps=min(max(block // 32, 1), 4),
        **overlapped(samples),
    )
    return drafted, counts

"""Stage in its padded form, for CUDA graphs: every plan row owns the same number of flat rows.

A flat row that holds no committed token and no draft is dead: it stands at position 0 of
the reserved slot, whose block table points at the reserved block. A plan row with nothing
to compute is padding; all of its flat rows are dead.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.interface import AttentionRows
from sametoken.kernels.overlap import overlapped, wait

_MAX_BLOCK = 256


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs of one step at fixed shapes: B plan rows of R flat rows each.

    Fields shared with ``StepInputs`` mean the same; flat row ``b * R + r`` is row r of plan
    row b.

    Attributes:
        slots: [B] int64; padding holds the reserved slot.
        num_tokens, num_computed: [B] int64, before the step.
        num_query: [B] int64, 0 for padding.
        num_drafts: [B] int64.
        samples: [B] bool; False for padding.
        token_ids: [B * R] int64; 0 in dead rows.
        rows: where the flat rows stand.
    """

    slots: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    num_query: Tensor
    num_drafts: Tensor
    samples: Tensor
    token_ids: Tensor
    rows: AttentionRows

    @property
    def rows_per_plan_row(self) -> int:
        """R."""
        return self.token_ids.shape[0] // self.slots.shape[0]


@triton.jit
def _stage_kernel(
    slots,  # [B]
    num_query,  # [B]
    draft_limit,  # [B] or None: no drafts
    samples,  # [B], 0 or 1
    token_ids,  # [S, max_len]
    num_tokens,  # [S]
    num_computed,  # [S]
    draft_ids,  # [S, k]
    num_drafts,  # [S]
    block_table,  # [S, max_blocks]
    staged_num_tokens,  # [B]
    staged_num_computed,  # [B]
    staged_num_query,  # [B]
    staged_num_drafts,  # [B]
    staged_samples,  # [B] bool
    staged_token_ids,  # [B, R]
    staged_positions,  # [B, R]
    staged_slots,  # [B, R]
    staged_kv_slots,  # [B, R]
    staged_committed,  # [B, R] bool
    token_stride,
    draft_stride,
    table_stride,
    reserved_slot,
    block_size,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)  # And no release: this writes where rows stand.
    plan_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + plan_row)
    # Padding is named twice, so that neither a stale slot nor a stale count can wake it.
    query = tl.where(slot == reserved_slot, 0, tl.load(num_query + plan_row).to(tl.int64))
    computed = tl.load(num_computed + slot)
    sampled = (query > 0) & (tl.load(samples + plan_row) != 0)
    drafts = query * 0
    if draft_limit is not None:
        offered = tl.minimum(tl.load(num_drafts + slot), tl.load(draft_limit + plan_row))
        drafts = tl.where(sampled, offered, 0)
    if tl.program_id(1) == 0:
        tl.store(staged_num_tokens + plan_row, tl.load(num_tokens + slot))
        tl.store(staged_num_computed + plan_row, computed)
        tl.store(staged_num_query + plan_row, query)
        tl.store(staged_num_drafts + plan_row, drafts)
        tl.store(staged_samples + plan_row, sampled)

    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < R
    live = row < query + drafts
    row_slot = tl.where(live, slot, reserved_slot)
    position = tl.where(live, computed + row, 0)
    token = tl.load(token_ids + slot * token_stride + position, row < query, other=0)
    if draft_limit is not None:
        is_draft = live & (row >= query)
        draft = tl.load(draft_ids + slot * draft_stride + row - query, is_draft, other=0)
        token = tl.where(is_draft, draft, token)
    entry = block_table + row_slot * table_stride + position // block_size
    kv_slot = tl.load(entry, inside, other=0) * block_size + position % block_size

    flat = plan_row * R + row
    tl.store(staged_token_ids + flat, token, inside)
    tl.store(staged_positions + flat, position, inside)
    tl.store(staged_slots + flat, row_slot, inside)
    tl.store(staged_kv_slots + flat, kv_slot, inside)
    tl.store(staged_committed + flat, row < query, inside)


def stage_windows(
    sequences: Any, slots: Tensor, draft_limit: Tensor, live: Tensor, rows_per_window: int
) -> PaddedInputs:
    """Windows of decoding slots: the last committed token, then the drafts.

    Args:
        sequences: the device's truth (``state.sequences.Sequences``).
        slots: [B] int64; padding holds the reserved slot.
        draft_limit: [B] int64, 0..k.
        live: [B] int64 or bool: 1, or 0 for padding.
        rows_per_window: R, at least 1 + the largest draft limit.
    """
    return _stage(sequences, slots, live, draft_limit, live, rows_per_window)


def stage_chunks(
    sequences: Any, slots: Tensor, num_query: Tensor, samples: Tensor, rows_per_chunk: int
) -> PaddedInputs:
    """Prefill chunks: the next ``num_query`` committed tokens of each slot; no drafts.

    Args:
        sequences: the device's truth (``state.sequences.Sequences``).
        slots: [B] int64; padding holds the reserved slot.
        num_query: [B] int64, 0..R; 0 for padding.
        samples: [B] int64 or bool, whether the chunk reaches the last committed token.
        rows_per_chunk: R.
    """
    return _stage(sequences, slots, num_query, None, samples, rows_per_chunk)


def _stage(
    sequences: Any,
    slots: Tensor,
    num_query: Tensor,
    draft_limit: Tensor | None,
    samples: Tensor,
    rows: int,
) -> PaddedInputs:
    batch = slots.shape[0]
    # Each by itself: a part of a larger tensor may be unaligned, and cost a compilation more.
    num_tokens, num_computed, staged_query, num_drafts = (slots.new_empty(batch) for _ in range(4))
    token_ids, positions, row_slots, kv_slots = (slots.new_empty(batch * rows) for _ in range(4))
    committed = slots.new_empty(batch * rows, dtype=torch.bool)
    staged_samples = slots.new_empty(batch, dtype=torch.bool)
    block = min(triton.next_power_of_2(rows), _MAX_BLOCK)
    _stage_kernel[(batch, triton.cdiv(rows, block))](
        slots,
        num_query,
        draft_limit,
        samples,
        sequences.token_ids,
        sequences.num_tokens,
        sequences.num_computed,
        sequences.draft_ids,
        sequences.num_drafts,
        sequences.block_table,
        num_tokens,
        num_computed,
        staged_query,
        num_drafts,
        staged_samples,
        token_ids,
        positions,
        row_slots,
        kv_slots,
        committed,
        sequences.token_ids.stride(0),
        sequences.draft_ids.stride(0),
        sequences.block_table.stride(0),
        sequences.reserved_slot,
        sequences.block_size,
        R=rows,
        BLOCK=block,
        num_warps=min(max(block // 32, 1), 4),
        **overlapped(slots),
    )
    return PaddedInputs(
        slots=slots,
        num_tokens=num_tokens,
        num_computed=num_computed,
        num_query=staged_query,
        num_drafts=num_drafts,
        samples=staged_samples,
        token_ids=token_ids,
        rows=AttentionRows(positions, row_slots, kv_slots, sequences.block_table, rows, committed),
    )

"""Rows of drafters with KV of their own, in Triton: one launch per commit and one per draft."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns
from sametoken.ops.pdl import gdc_launch_and_wait, gdc_wait, pdl_options
from sametoken.ops.step.reference import widened
from sametoken.ops.step.triton_inputs import kv_slot_of, store_rows
from sametoken.ops.step.types import CatchUp, Chains, Sequences, StepInputs

_MAX_BLOCK = 256


@triton.jit(do_not_specialize=["num_requests", "num_rows", "reserved_slot"])
def _catch_up_kernel(
    slots,  # [B]
    row_starts,  # [B + 1], of the step
    start,  # [B]
    end,  # [B]
    samples,  # [B] bool
    token_ids,  # [S, max_len]
    block_table,  # [S, max_blocks]
    run_starts,  # [B + 1], written if NEWEST, as all below
    row_token_ids,  # [T]
    row_positions,  # [T]
    row_slots,  # [T]
    row_kv_slots,  # [T]
    row_committed,  # [T] bool
    chain_last,  # [B]
    last_positions,  # [B]
    chain_positions,  # [B]
    chain_slots,  # [B]
    chain_kv_slots,  # [B]
    chain_committed,  # [B] bool
    chain_following,  # [B]
    num_requests,
    num_rows,
    token_stride,
    table_stride,
    reserved_slot,
    block_size,
    NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)  # A barrier (no trigger): writes ``AttentionRows``.
    owner = tl.program_id(0).to(tl.int64)
    is_real = owner < num_requests
    first_row = tl.load(row_starts + owner) + owner * NEWEST
    stop_row = tl.load(row_starts + owner + 1, is_real, other=0) + (owner + 1) * NEWEST
    stop_row = tl.where(is_real, stop_row, num_rows)
    first = tl.load(start + owner, is_real, other=0)
    after = tl.load(end + owner, is_real, other=0)
    slot = tl.load(slots + owner, is_real, other=reserved_slot)
    sampled = tl.load(samples + owner, is_real, other=0) != 0
    stop = after + sampled.to(tl.int64) * NEWEST
    table = (block_table, table_stride, block_size)
    if tl.program_id(1) == 0:
        if NEWEST:
            tl.store(run_starts + owner, first_row)
        position, before = tl.where(sampled, after, 0), tl.where(sampled, stop - 1, 0)
        chain_slot = tl.where(sampled, slot, reserved_slot)
        # A request without rows may start past the last row.
        last = tl.minimum(first_row + tl.maximum(stop - first - 1, 0), num_rows - 1)
        tl.store(chain_last + owner, last, is_real)
        tl.store(last_positions + owner, before, is_real)
        tl.store(chain_positions + owner, position, is_real)
        tl.store(chain_slots + owner, chain_slot, is_real)
        tl.store(chain_kv_slots + owner, kv_slot_of(table, chain_slot, position, is_real), is_real)
        tl.store(chain_committed + owner, position < 0, is_real)
        tl.store(chain_following + owner, position + 1, is_real)

    rows = (row_token_ids, row_positions, row_slots, row_kv_slots, row_committed)
    begin, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    for at in range(begin, (stop_row - first_row).to(tl.int32), step):
        row = at + tl.arange(0, BLOCK)
        inside = row < stop_row - first_row
        live = inside & (first + row < stop)
        row_slot = tl.where(live, slot, reserved_slot)
        position = tl.where(live, first + row, 0)
        held = token_ids + row_slot * token_stride + position
        if not NEWEST:
            held += 1
        found = (tl.load(held, inside, other=0), position, row_slot)
        committed = live & (first + row < after)
        store_rows(rows, first_row + row, inside, found, committed, table)


@triton.jit(do_not_specialize=["count"])
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
    PDL: tl.constexpr,
):
    gdc_wait(PDL)  # A barrier (no trigger): writes ``AttentionRows``.
    chain = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = chain < count
    slot = tl.load(slots + chain, inside, other=0)
    position = tl.load(following + chain, inside, other=0)
    kv_slot = kv_slot_of((block_table, table_stride, block_size), slot, position, inside)
    tl.store(kv_slots + chain, kv_slot, inside)
    tl.store(new_following + chain, position + 1, inside)


@triton.jit
def _stack_kernel(
    tokens,  # K of [B]
    samples,  # [B] bool
    drafted,  # [B, K], written
    counts,  # [B], written
    num_rows,  # B
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_rows
    for i in tl.static_range(K):
        tl.store(drafted + request * K + i, tl.load(tokens[i] + request, inside), inside)
    sampled = tl.load(samples + request, inside, other=0) != 0
    tl.store(counts + request, sampled.to(tl.int64) * K, inside)


def catch_up(sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool) -> CatchUp:
    """See ``StepOps.catch_up``."""
    slots, table, runs = x.slots, sequences.block_table, x.rows.runs
    assert runs is not None
    batch, count = slots.shape[0], x.token_ids.shape[0] + with_newest * slots.shape[0]
    # Separate allocations: views of a larger tensor may be unaligned, and cost another compilation.
    token_ids, positions, row_slots, kv_slots = (slots.new_empty(count) for _ in range(4))
    last, last_positions, chain_positions, chain_slots, chain_kv_slots, following = (
        slots.new_empty(batch) for _ in range(6)
    )
    committed = slots.new_empty(count, dtype=torch.bool)
    chain_committed = slots.new_empty(batch, dtype=torch.bool)
    if with_newest:
        runs = widened(runs, slots.new_empty(batch + 1))
    longest = max(runs.max_rows, count - batch)
    _catch_up_kernel[(batch + 1, triton.cdiv(longest, _MAX_BLOCK))](
        slots,
        x.row_starts,
        x.num_computed,
        end,
        x.samples,
        sequences.token_ids,
        table,
        runs.starts,
        token_ids,
        positions,
        row_slots,
        kv_slots,
        committed,
        last,
        last_positions,
        chain_positions,
        chain_slots,
        chain_kv_slots,
        chain_committed,
        following,
        batch,
        count,
        sequences.token_ids.stride(0),
        table.stride(0),
        sequences.reserved_slot,
        sequences.block_size,
        NEWEST=int(with_newest),
        BLOCK=_MAX_BLOCK,
        num_warps=4,
        **pdl_options(slots),
    )
    chain_runs = RowRuns.even(batch, 1)
    chain_rows = AttentionRows(
        chain_positions, chain_slots, chain_kv_slots, table, chain_runs, chain_committed
    )
    rows = AttentionRows(positions, row_slots, kv_slots, table, runs, committed)
    kept = KeptRows(last, last_positions, chain_slots, table, chain_runs)
    return CatchUp(token_ids, rows, None, Chains(None, kept, chain_rows, following))


def advanced(sequences: Sequences, chains: Chains) -> Chains:
    """See ``StepOps.advanced``; one launch."""
    rows, table = chains.rows, sequences.block_table
    count = rows.slots.shape[0]
    kv_slots, following = torch.empty_like(rows.slots), torch.empty_like(rows.slots)
    block = min(triton.next_power_of_2(max(count, 1)), _MAX_BLOCK)
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
        **pdl_options(rows.slots),
    )
    runs = RowRuns.even(count, 1)
    advanced_rows = AttentionRows(
        chains.following, rows.slots, kv_slots, table, runs, rows.committed
    )
    return Chains(chains.owner, chains.last, advanced_rows, following)


def stacked(tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
    """See ``StepOps.stacked``; one launch."""
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
        **pdl_options(samples),
    )
    return drafted, counts

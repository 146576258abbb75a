"""Step inputs, and transfers of layouts and results between host and device, in Triton.

Kernels inside the captured step read and write pinned (mapped) host memory directly; a memcpy
outside the graph would leave a gap on the device.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionRows, SampledRows
from sametoken.ops.pdl import gdc_launch_and_wait, gdc_wait, pdl_options
from sametoken.ops.step.types import NUM_COUNTS, LayoutTable, Sequences, StepInputs, VerifyResult
from sametoken.ops.triton_versions import FUSED
from sametoken.types import layout as columns

_BLOCK = 128

_SLOT = tl.constexpr(columns.SLOT)
_NUM_QUERY = tl.constexpr(columns.NUM_QUERY)
_DRAFT_LIMIT = tl.constexpr(columns.DRAFT_LIMIT)
_SAMPLES = tl.constexpr(columns.SAMPLES)
_ROW_START = tl.constexpr(columns.ROW_START)
_WINDOW_START = tl.constexpr(columns.WINDOW_START)


@triton.jit
def kv_slot_of(
    table,  # [S, max_blocks], its stride, block size
    slot,
    position,
    inside,
):
    """``block_id * block_size + offset`` of slots' positions."""
    block_table, table_stride, block_size = table
    entry = block_table + slot * table_stride + position // block_size
    return tl.load(entry, inside, other=0) * block_size + position % block_size


@triton.jit
def store_rows(
    rows,  # token ids, positions, slots, KV slots and flags of all rows, written
    place,
    inside,
    found,  # tokens, positions and slots
    committed,
    table,  # as for kv_slot_of
):
    """Write rows with their KV addresses."""
    to_token_ids, to_positions, to_slots, to_kv_slots, to_committed = rows
    token, position, slot = found
    tl.store(to_token_ids + place, token, inside)
    tl.store(to_positions + place, position, inside)
    tl.store(to_slots + place, slot, inside)
    tl.store(to_kv_slots + place, kv_slot_of(table, slot, position, inside), inside)
    tl.store(to_committed + place, committed, inside)


@triton.jit
def _span(start, end, is_padding):
    """Start and end of a request's rows from running sums; padding ends at ``end``."""
    stop = tl.load(start + 1, ~is_padding, other=0)
    return tl.load(start), tl.where(is_padding, end, stop)


@triton.jit
def _prepare_rows(
    row,  # indices among the request's rows
    request,  # slot, computed, query, drafts
    memory,  # token_ids, draft_ids, and their strides
    reserved_slot,
):
    """Token, position and slot of rows; dead rows are at position 0 of the reserved slot."""
    slot, computed, query, drafts = request
    token_ids, draft_ids, token_stride, draft_stride = memory
    live = row < query + drafts
    row_slot = tl.where(live, slot, reserved_slot)
    position = tl.where(live, computed + row, 0)
    token = tl.load(token_ids + slot * token_stride + position, row < query, other=0)
    is_draft = live & (row >= query)
    draft = tl.load(draft_ids + slot * draft_stride + row - query, is_draft, other=0)
    return tl.where(is_draft, draft, token), position, row_slot


@triton.jit(
    do_not_specialize=[
        "layout_stride", "num_requests", "num_rows", "num_sampled", "reserved_slot"
    ]
)  # fmt: skip
def _prepare_inputs_kernel(
    layout,  # [TABLE_ROWS, layout_stride]
    token_ids,  # [S, max_len]
    num_tokens,  # [S]
    num_computed,  # [S]
    draft_ids,  # [S, k]
    num_drafts,  # [S]
    block_table,  # [S, max_blocks]
    step_num_tokens,  # [B], written, as all below
    step_num_computed,  # [B]
    step_num_proposed,  # [B]
    step_num_drafts,  # [B]
    step_samples,  # [B] bool
    row_token_ids,  # [T]
    row_positions,  # [T]
    row_slots,  # [T]
    row_kv_slots,  # [T]
    row_committed,  # [T] bool
    sampled_index,  # [L], or None: every row is sampled
    sampled_slots,  # [L]
    sampled_positions,  # [L]
    sampled_token_ids,  # [L]
    sampled_offsets,  # [L]
    layout_stride,
    num_requests,
    num_rows,
    num_sampled,
    token_stride,
    draft_stride,
    table_stride,
    reserved_slot,
    block_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)  # A barrier (no trigger): writes ``AttentionRows``.
    owner = tl.program_id(0).to(tl.int64)
    is_padding = owner == num_requests
    field = layout + owner
    first, stop = _span(field + _ROW_START * layout_stride, num_rows, is_padding)
    window, window_stop = _span(field + _WINDOW_START * layout_stride, num_sampled, is_padding)
    slot = tl.load(field + _SLOT * layout_stride)
    # Two conditions, so that neither a stale slot nor a stale count makes padding live.
    query = tl.load(field + _NUM_QUERY * layout_stride)
    query = tl.where(is_padding | (slot == reserved_slot), 0, query)
    computed = tl.load(num_computed + slot)
    sampled = (query > 0) & (tl.load(field + _SAMPLES * layout_stride) != 0)
    proposed = tl.where(sampled, tl.load(num_drafts + slot), 0)
    drafts = tl.minimum(proposed, tl.load(field + _DRAFT_LIMIT * layout_stride))
    if (tl.program_id(1) == 0) & (owner < num_requests):
        tl.store(step_num_tokens + owner, tl.load(num_tokens + slot))
        tl.store(step_num_computed + owner, computed)
        tl.store(step_num_proposed + owner, proposed)
        tl.store(step_num_drafts + owner, drafts)
        tl.store(step_samples + owner, sampled)

    request = (slot, computed, query, drafts)
    memory = (token_ids, draft_ids, token_stride, draft_stride)
    begin, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    rows = (row_token_ids, row_positions, row_slots, row_kv_slots, row_committed)
    table = (block_table, table_stride, block_size)
    for at in range(begin, (stop - first).to(tl.int32), step):
        row = at + tl.arange(0, BLOCK)
        found = _prepare_rows(row, request, memory, reserved_slot)
        store_rows(rows, first + row, row < stop - first, found, row < query, table)
    for at in range(begin, (window_stop - window).to(tl.int32), step):
        offset = at + tl.arange(0, BLOCK)
        place, inside = window + offset, offset < window_stop - window
        tl.store(sampled_offsets + place, offset.to(tl.int64), inside)
        if sampled_index is not None:
            # Padding after the last window has no query rows.
            row = offset + tl.maximum(query - 1, 0)
            token, position, row_slot = _prepare_rows(row, request, memory, reserved_slot)
            tl.store(sampled_index + place, tl.where(is_padding, 0, first + row), inside)
            tl.store(sampled_slots + place, row_slot, inside)
            tl.store(sampled_positions + place, position, inside)
            tl.store(sampled_token_ids + place, token, inside)


def prepare_inputs(sequences: Sequences, layout: LayoutTable) -> StepInputs:
    """See ``StepOps.prepare_inputs``."""
    shape, table = layout.shape, layout.table
    assert table.is_contiguous()
    # Separate allocations: views of a larger tensor may be unaligned, and cost another compilation.
    lengths = [table.new_empty(shape.num_requests) for _ in range(4)]
    samples = table.new_empty(shape.num_requests, dtype=torch.bool)
    token_ids, positions, row_slots, kv_slots = (table.new_empty(shape.num_rows) for _ in range(4))
    committed = table.new_empty(shape.num_rows, dtype=torch.bool)
    if shape.all_sampled:
        offsets = table.new_empty(shape.num_sampled)
        sampled = SampledRows(None, row_slots, positions, token_ids, offsets)
    else:
        sampled = SampledRows(*(table.new_empty(shape.num_sampled) for _ in range(5)))
    longest = max(shape.max_rows, shape.num_rows - shape.num_requests, 1)
    _prepare_inputs_kernel[(shape.num_requests + 1, triton.cdiv(longest, _BLOCK))](
        table,
        sequences.token_ids,
        sequences.num_tokens,
        sequences.num_computed,
        sequences.draft_ids,
        sequences.num_drafts,
        sequences.block_table,
        *lengths,
        samples,
        token_ids,
        positions,
        row_slots,
        kv_slots,
        committed,
        sampled.index,
        sampled.slots,
        sampled.positions,
        sampled.token_ids,
        sampled.offsets,
        table.stride(0),
        shape.num_requests,
        shape.num_rows,
        shape.num_sampled,
        sequences.token_ids.stride(0),
        sequences.draft_ids.stride(0),
        sequences.block_table.stride(0),
        sequences.reserved_slot,
        sequences.block_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(table),
    )
    blocks = sequences.block_table
    rows = AttentionRows(positions, row_slots, kv_slots, blocks, layout.runs, committed)
    return layout.inputs(sequences, lengths, samples, token_ids, rows, sampled)


_COUNTS = tl.constexpr(NUM_COUNTS)
#: Integers that one warp reads at most.
_PER_WARP = 512


@triton.jit(do_not_specialize=["num_entries", "entry_size", "size"])
def _fetch_kernel(
    entries,  # [num_entries, entry_size], in host memory
    num_fetched,  # [1], written
    table,  # [size], written
    num_entries,
    entry_size,
    size,
    BLOCK: tl.constexpr,
):
    now = tl.load(num_fetched)
    entry = entries + (now % num_entries) * entry_size
    place = tl.arange(0, BLOCK)
    # Not cached: the host reuses entries.
    value = tl.load(entry + place, place < size, other=0, cache_modifier=".cv")
    tl.store(table + place, value, place < size)
    # All threads must have read the counter before one writes it.
    tl.debug_barrier()
    tl.store(num_fetched, now + 1)


@triton.jit(do_not_specialize=["row_stride"])
def _deliver_kernel(
    step_ids,  # [B]
    places,  # [B]
    num_drafts,  # [B]
    num_proposed,  # [B]
    num_accepted,  # [B]
    faults,  # [B]
    window_starts,  # [B + 1]
    tokens,  # [L]
    results,  # [R, row_stride], in host memory, written
    row_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    request = tl.program_id(0).to(tl.int64)
    place = tl.load(places + request)
    first, stop = tl.load(window_starts + request), tl.load(window_starts + request + 1)
    result = results + place * row_stride
    live = place >= 0
    tl.store(result, tl.load(step_ids + request), live)
    tl.store(result + 1, tl.load(num_drafts + request), live)
    tl.store(result + 2, tl.load(num_proposed + request), live)
    tl.store(result + 3, tl.load(num_accepted + request), live)
    tl.store(result + 4, tl.load(faults + request), live)
    row = tl.arange(0, BLOCK)
    inside = row < stop - first
    token = tl.load(tokens + first + row, inside, other=0)
    tl.store(result + _COUNTS + row, token, inside & live)


def fetch(entries: Tensor, num_fetched: Tensor, table: Tensor) -> None:
    """See ``StepOps.fetch``."""
    assert entries.is_contiguous()
    assert table.is_contiguous()
    assert table.numel() <= entries.shape[1]
    _fetch_kernel[(1,)](
        entries,
        num_fetched,
        table,
        entries.shape[0],
        entries.shape[1],
        table.numel(),
        # Of the largest table, so that one compiled form reads all.
        BLOCK=triton.next_power_of_2(entries.shape[1]),
        num_warps=4 if entries.shape[1] > _PER_WARP else 1,
        **FUSED,
    )


def deliver(x: StepInputs, verified: VerifyResult, results: Tensor) -> None:
    """See ``StepOps.deliver``."""
    assert results.stride(1) == 1
    assert results.shape[1] >= NUM_COUNTS + x.num_speculative_tokens + 1
    _deliver_kernel[(x.slots.shape[0],)](
        x.step_ids,
        x.places,
        x.num_drafts,
        x.num_proposed,
        verified.num_accepted,
        verified.faults,
        x.window_starts,
        verified.tokens,
        results,
        results.stride(0),
        BLOCK=triton.next_power_of_2(x.num_speculative_tokens + 1),
        num_warps=1,
        **pdl_options(x.slots),
    )

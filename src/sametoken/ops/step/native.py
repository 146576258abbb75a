"""``StepOps`` of a CPU with a C compiler: ``compact``, but what writes no length is in C."""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, SampledRows
from sametoken.ops.native.library import load_library
from sametoken.ops.native.weights import require
from sametoken.ops.step import reference
from sametoken.ops.step.compact import (
    advanced,
    catch_up,
    commit,
    fetch,
    known_drafts,
    publish,
    stacked,
    write_tables,
)
from sametoken.ops.step.types import Chances, LayoutTable, Sequences, StepInputs, VerifyResult

__all__ = [
    "advanced",
    "catch_up",
    "commit",
    "deliver",
    "fetch",
    "known_drafts",
    "prepare_inputs",
    "publish",
    "stacked",
    "verify",
    "write_tables",
]


def prepare_inputs(sequences: Sequences, layout: LayoutTable) -> StepInputs:
    """See ``StepOps.prepare_inputs``."""
    shape, table = layout.shape, layout.table
    count, num_rows = shape.num_requests, shape.num_rows
    num_sampled = 0 if shape.all_sampled else shape.num_sampled
    requests, rows = table.new_empty(4, count), table.new_empty(5, num_rows)
    samples, committed = (torch.empty(n, dtype=torch.bool) for n in (count, num_rows))
    apart = table.new_empty(5, num_sampled)
    tokens, draft_ids, blocks = sequences.token_ids, sequences.draft_ids, sequences.block_table
    lengths = (sequences.num_tokens, sequences.num_computed, sequences.num_drafts)
    for one in (table, tokens, draft_ids, blocks, *lengths):
        require(one, torch.int64)
    load_library().step_rows(
        table.data_ptr(), table.shape[1], count, num_rows, num_sampled,
        tokens.data_ptr(), tokens.shape[1],
        sequences.num_tokens.data_ptr(), sequences.num_computed.data_ptr(),
        draft_ids.data_ptr(), sequences.num_drafts.data_ptr(), draft_ids.shape[1],
        blocks.data_ptr(), blocks.shape[1], sequences.block_size, sequences.reserved_slot,
        requests.data_ptr(), samples.data_ptr(), rows.data_ptr(), committed.data_ptr(),
        apart.data_ptr(),
    )  # fmt: skip
    slots, positions, token_ids, kv_slots, offsets = rows.unbind()
    sampled = (
        SampledRows(None, slots, positions, token_ids, offsets)
        if shape.all_sampled
        else SampledRows(*apart.unbind())
    )
    attended = AttentionRows(positions, slots, kv_slots, blocks, layout.runs, committed)
    return layout.inputs(sequences, requests.unbind(), samples, token_ids, attended, sampled)


def verify(keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
    """See ``StepOps.verify``."""
    if chances is not None:
        return reference.verify(keys, x, chances)
    (num_rows, tiles), count = keys.shape, x.slots.shape[0]
    require(keys, torch.int64)
    require(x.sampled.token_ids, torch.int64)
    by_row, results = keys.new_empty(2, num_rows), keys.new_empty(3, count)
    best, tokens = by_row.unbind()
    load_library().verify_windows(
        keys.data_ptr(), num_rows, tiles, x.sampled.token_ids.data_ptr(),
        x.window_starts.data_ptr(), count, x.num_drafts.data_ptr(), x.samples.data_ptr(),
        best.data_ptr(), tokens.data_ptr(), results.data_ptr(),
    )  # fmt: skip
    return VerifyResult(tokens, *results.unbind())


def deliver(x: StepInputs, verified: VerifyResult, results: Tensor) -> None:
    """See ``StepOps.deliver``."""
    numbers = (x.step_ids, x.num_drafts, x.num_proposed, verified.num_accepted, verified.faults)
    for one in (results, verified.tokens, *numbers):
        require(one, torch.int64)
    load_library().deliver_results(
        *(one.data_ptr() for one in numbers), x.places.data_ptr(), x.window_starts.data_ptr(),
        len(x.slots), verified.tokens.data_ptr(), len(verified.tokens),
        results.data_ptr(), results.shape[1],
    )  # fmt: skip

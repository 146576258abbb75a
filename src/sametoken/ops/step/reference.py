"""``StepOps`` in plain PyTorch, with static shapes; also part of the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns, SampledRows
from sametoken.ops.sampling.sample import has_nan, has_no_valid_token, token_of
from sametoken.ops.step.types import (
    HAS_NAN,
    NO_TOKEN,
    NUM_COUNTS,
    SOUND,
    CatchUp,
    Chains,
    Chances,
    CommittedLengths,
    LayoutTable,
    Sequences,
    StepInputs,
    TableWrite,
    VerifyResult,
)
from sametoken.types import layout as columns

# The golden ratio in 64 bits and SplitMix64's two factors (Steele et al., OOPSLA 2014), as int64.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FACTOR_30 = 0xBF58476D1CE4E5B9 - (1 << 64)
FACTOR_27 = 0x94D049BB133111EB - (1 << 64)


def write_tables(writes: Sequence[TableWrite]) -> None:
    """See ``StepOps.write_tables``."""
    for part, values in writes:
        if isinstance(values, float | int):
            part.fill_(values)
        else:
            part.copy_(torch.tensor(values, dtype=part.dtype))


def known_drafts(sequences: Sequences, slots: Sequence[int]) -> list[int] | None:
    """See ``StepOps.known_drafts``: None, for static shapes as in a CUDA graph."""
    return None


def prepare_inputs(sequences: Sequences, layout: LayoutTable) -> StepInputs:
    """See ``StepOps.prepare_inputs``."""
    table, count = layout.table, layout.shape.num_requests
    # One more column: rows after the last request's belong to padding.
    slots, num_query, limits, samples = (table[i, : count + 1] for i in range(4))
    num_computed = sequences.num_computed[slots]
    num_proposed = sequences.num_drafts[slots] * samples
    num_drafts = torch.minimum(num_proposed, limits)

    owner, offset = _owners(layout.starts(columns.ROW_START), layout.shape.num_rows)
    live = offset < (num_query + num_drafts)[owner]
    is_query = offset < num_query[owner]
    row_slots = torch.where(live, slots[owner], sequences.reserved_slot)
    positions = torch.where(live, num_computed[owner] + offset, 0)
    token_ids = sequences.token_ids[row_slots, positions]
    if sequences.num_speculative_tokens:
        draft = (offset - num_query[owner]).clamp(0, sequences.num_speculative_tokens - 1)
        token_ids = torch.where(is_query, token_ids, sequences.draft_ids[row_slots, draft])
    rows = rows_at(sequences, row_slots, positions, layout.runs, live & is_query)
    sampled = (
        SampledRows(None, row_slots, positions, token_ids, offset)
        if layout.shape.all_sampled
        else _sampled(sequences, layout, num_query, rows, token_ids)
    )
    lengths = (
        sequences.num_tokens[slots[:count]],
        *(of[:count] for of in (num_computed, num_proposed, num_drafts)),
    )
    return layout.inputs(sequences, lengths, samples[:count].bool(), token_ids, rows, sampled)


def _owners(starts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """[num_rows] int64 each: a row's request, B after the last, and its index in the request."""
    row = torch.arange(num_rows, device=starts.device)
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    return owner, row - starts[owner]


def _sampled(
    sequences: Sequences, layout: LayoutTable, num_query: Tensor, rows: AttentionRows, ids: Tensor
) -> SampledRows:
    """The sampled rows of a step in which not all rows are sampled."""
    owner, offset = _owners(layout.starts(columns.WINDOW_START), layout.shape.num_sampled)
    first = layout.starts(columns.ROW_START) + num_query - 1
    index = (first[owner] + offset).clamp(max=layout.shape.num_rows - 1)
    is_padding = owner == layout.shape.num_requests
    slots = rows.slots[index].masked_fill(is_padding, sequences.reserved_slot)
    positions = rows.positions[index].masked_fill(is_padding, 0)
    return SampledRows(index, slots, positions, ids[index], offset)


def rows_at(
    sequences: Sequences,
    slots: Tensor,
    positions: Tensor,
    runs: RowRuns,
    committed: Tensor,
) -> AttentionRows:
    """Rows at [T] slots and positions, with KV addresses from the block table."""
    block_size = sequences.block_size
    blocks = sequences.block_table[slots, positions // block_size]
    kv_slots = blocks * block_size + positions % block_size
    return AttentionRows(positions, slots, kv_slots, sequences.block_table, runs, committed)


def verify(keys: Tensor, x: StepInputs, chances: Chances | None = None) -> VerifyResult:
    """See ``StepOps.verify``."""
    best = keys.amax(dim=1)
    tokens = token_of(best)
    starts, num_rows = x.window_starts, tokens.shape[0]
    owner, offset = _owners(starts, num_rows)
    # Rows after the last window are padding.
    is_padding = owner == x.slots.shape[0]
    owner = owner.clamp(max=x.slots.shape[0] - 1)
    num_drafts = x.num_drafts[owner]
    inside = ~is_padding & (offset <= num_drafts) & x.samples[owner]
    drafts, no_valid_token = x.sampled.token_ids.roll(-1), has_no_valid_token(best)
    fault = torch.where(no_valid_token, NO_TOKEN, torch.where(has_nan(best), HAS_NAN, SOUND))
    # A row with a fault waits until it is a window's first, so a request fails after the same
    # tokens with drafts or without. The last row has no draft after it: every window has an end.
    differs = (tokens != drafts) | (offset >= num_drafts) | (fault != SOUND).roll(-1)
    misses = torch.where(inside & differs, offset, num_drafts)
    matches = x.num_drafts.scatter_reduce(0, owner, misses, "amin")
    first = inside & (offset == 0)
    faults = torch.zeros_like(matches).scatter_reduce(0, owner, fault * first, "amax")
    if chances is not None:
        matches = _accepted_by_chance(chances, x)
    verified = x.samples & (faults == SOUND)
    num_accepted = torch.where(verified, matches, 0)
    if chances is not None:
        tokens = torch.where(inside & (offset < num_accepted[owner]), drafts, tokens)
    # Requests without a window may start one past the end; they read the padding.
    ends = torch.nn.functional.pad(tokens, (0, 1))[starts[:-1] + num_accepted]
    return VerifyResult(tokens, num_accepted, torch.where(verified, ends, 0), faults)


def _accepted_by_chance(chances: Chances, x: StepInputs) -> Tensor:
    """[B] int64, 0..num_drafts."""
    index = torch.arange(chances.rates.shape[0], device=x.slots.device)
    noise = uniform(chances.seeds[x.slots][:, None], x.num_tokens[:, None] + index)
    hit = (noise < chances.rates) & (index < x.num_drafts[:, None])
    return hit.long().cumprod(dim=1).sum(dim=1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """fp32 in [0, 1), a function of (seed, position) only; int64 tensors that broadcast."""
    word = seeds + (positions + 1) * STEP
    for shift, factor in ((30, FACTOR_30), (27, FACTOR_27)):
        # int64 shifts copy the sign bit, so the copies are masked out.
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * factor
    # The generator's last step would not change its upper 31 bits, which include these 24.
    return ((word >> 40) & 0xFFFFFF) * 2.0**-24


def commit(
    sequences: Sequences, x: StepInputs, num_accepted: Tensor, next_token: Tensor
) -> CommittedLengths:
    """See ``StepOps.commit``."""
    num_computed = x.num_computed + x.num_query + num_accepted
    num_tokens = torch.where(x.samples, x.num_tokens + num_accepted + 1, x.num_tokens)
    sequences.num_computed[x.slots] = num_computed
    sequences.num_tokens[x.slots] = num_tokens

    # Prompt rows rewrite the same tokens; accepted draft rows become committed tokens. Dead rows
    # are on the reserved slot, which has no computed positions.
    committed = x.rows.positions < sequences.num_computed[x.rows.slots]
    slots, positions = x.rows.slots[committed], x.rows.positions[committed]
    sequences.token_ids[slots, positions] = x.token_ids[committed]
    sampled = x.samples
    sequences.token_ids[x.slots[sampled], num_tokens[sampled] - 1] = next_token[sampled]
    return CommittedLengths(num_tokens, num_computed)


def publish(sequences: Sequences, x: StepInputs, draft_ids: Tensor, num_drafts: Tensor) -> None:
    """See ``StepOps.publish``."""
    # The reserved slot, which dead rows read, stays 0.
    is_padding = (x.slots == sequences.reserved_slot)[:, None]
    sequences.draft_ids[x.slots] = draft_ids.masked_fill(is_padding, 0)
    sequences.num_drafts[x.slots] = torch.where(x.samples, num_drafts, 0)


def deliver(x: StepInputs, verified: VerifyResult, results: Tensor) -> None:
    """See ``StepOps.deliver``."""
    counts = (x.step_ids, x.num_drafts, x.num_proposed, verified.num_accepted, verified.faults)
    window = torch.arange(results.shape[1] - NUM_COUNTS, device=x.slots.device)
    # Columns past a window's end hold any token.
    tokens = torch.nn.functional.pad(verified.tokens, (0, 1))
    where = (x.window_starts[:-1, None] + window).clamp(max=tokens.shape[0] - 1)
    packed = torch.cat((torch.stack(counts, dim=1), tokens[where]), dim=1)
    live = x.places >= 0
    results[x.places[live]] = packed[live]


def fetch(entries: Tensor, num_fetched: Tensor, table: Tensor) -> None:
    """See ``StepOps.fetch``."""
    entry = entries[int(num_fetched) % entries.shape[0]]
    table.view(-1).copy_(entry[: table.numel()])
    num_fetched += 1


def catch_up(sequences: Sequences, x: StepInputs, end: Tensor, *, with_newest: bool) -> CatchUp:
    """See ``StepOps.catch_up``."""
    count = x.slots.shape[0]
    request = torch.arange(count + 1, device=end.device)
    starts = x.row_starts + request * with_newest
    stop = end + x.samples if with_newest else end
    runs = x.rows.runs
    assert runs is not None
    runs = widened(runs, starts) if with_newest else runs
    owner, offset = _owners(starts, x.token_ids.shape[0] + count * with_newest)
    is_padding = owner == count
    owner = owner.clamp(max=count - 1)
    positions = x.num_computed[owner] + offset
    live = ~is_padding & (positions < stop[owner])
    committed = live & (positions < end[owner])
    row_slots = torch.where(live, x.slots[owner], sequences.reserved_slot)
    positions = torch.where(live, positions, 0)
    ahead = 0 if with_newest else 1
    # A request without rows may start past the last row.
    last = starts[:-1] + (stop - x.num_computed - 1).clamp(min=0)
    last = last.clamp(max=owner.shape[0] - 1)
    return CatchUp(
        sequences.token_ids[row_slots, positions + ahead],
        rows_at(sequences, row_slots, positions, runs, committed),
        None,
        _chains(sequences, x, end, stop - 1, last),
    )


def widened(runs: RowRuns, starts: Tensor) -> RowRuns:
    """``runs`` with one more row each, starting at ``starts``."""
    max_short = runs.max_short + 1 if runs.num_short else 0
    return RowRuns(starts.shape[0] - 1, runs.max_rows + 1, starts, runs.num_short, max_short)


def _chains(
    sequences: Sequences, x: StepInputs, end: Tensor, caught_up: Tensor, index: Tensor
) -> Chains:
    """Chains from ``end`` on, whose last caught-up rows are at positions and places."""
    positions, before = (torch.where(x.samples, one, 0) for one in (end, caught_up))
    slots = torch.where(x.samples, x.slots, sequences.reserved_slot)
    runs = RowRuns.even(slots.shape[0], 1)
    rows = rows_at(sequences, slots, positions, runs, torch.zeros_like(x.samples))
    last = KeptRows(index, before, slots, sequences.block_table, runs)
    return Chains(None, last, rows, positions + 1)


def live_rows(found: CatchUp, samples: Tensor, reserved_slot: int) -> CatchUp:
    """Drop dead rows and chains; the result's shapes depend on the data.

    Args:
        found: from ``catch_up``.
        samples: [B] bool; other requests lose their chain.
        reserved_slot: the slot of dead rows.
    """
    alive = (found.rows.slots != reserved_slot).nonzero().squeeze(1)
    owner = samples.nonzero().squeeze(1)
    # A row's index among the live rows.
    place = torch.cumsum(found.rows.slots != reserved_slot, 0) - 1
    chains, last = found.chains, found.chains.last
    left = KeptRows(
        place[last.index[owner]], last.positions[owner], last.slots[owner], last.block_table
    )
    return CatchUp(
        found.token_ids[alive],
        _rows_of(found.rows, alive),
        alive,
        Chains(owner, left, _rows_of(chains.rows, owner), chains.following[owner]),
    )


def _rows_of(rows: AttentionRows, index: Tensor) -> AttentionRows:
    committed = None if rows.committed is None else rows.committed[index]
    return AttentionRows(
        rows.positions[index],
        rows.slots[index],
        rows.kv_slots[index],
        rows.block_table,
        None,
        committed,
    )


def advanced(sequences: Sequences, chains: Chains) -> Chains:
    """See ``StepOps.advanced``."""
    rows = chains.rows
    assert rows.committed is not None
    runs = RowRuns.even(rows.slots.shape[0], 1)
    ahead = rows_at(sequences, rows.slots, chains.following, runs, rows.committed)
    return Chains(chains.owner, chains.last, ahead, chains.following + 1)


def stacked(tokens: Sequence[Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
    """See ``StepOps.stacked``."""
    return torch.stack(tuple(tokens), dim=1), samples * len(tokens)

"""The padded stage against the reference: same live rows, harmless dead ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from sametoken.core.plan import PlanRow
from sametoken.kernels.stage import reference
from sametoken.kernels.stage.triton import stage_chunks, stage_windows
from sametoken.state.sequences import Sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, MAX_LEN, K, BLOCK_SIZE, RESERVED_BLOCK = 5, 40, 3, 4, 71
GARBAGE = 10**15


def sequences_of(lengths: list[tuple[int, int, int]]) -> Sequences:
    """Slots of (num_tokens, num_computed, num_drafts); garbage wherever nothing may be read."""
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=MAX_LEN,
        num_drafts=K,
        block_size=BLOCK_SIZE,
        reserved_block=RESERVED_BLOCK,
        device=torch.device("cpu"),
    )
    sequences.token_ids[:SLOTS] = GARBAGE
    sequences.draft_ids[:SLOTS] = GARBAGE
    for slot, (num_tokens, num_computed, num_drafts) in enumerate(lengths):
        sequences.token_ids[slot, :num_tokens] = 1000 * slot + torch.arange(num_tokens)
        sequences.draft_ids[slot, :num_drafts] = 1000 * slot + 500 + torch.arange(num_drafts)
        sequences.num_tokens[slot] = num_tokens
        sequences.num_computed[slot] = num_computed
        sequences.num_drafts[slot] = num_drafts
        sequences.block_table[slot] = 10 * slot + torch.arange(MAX_LEN // BLOCK_SIZE)
    return sequences


def on_device(sequences: Sequences) -> Sequences:
    names = ("token_ids", "num_tokens", "num_computed", "prompt_len", "draft_ids", "num_drafts")
    tensors = {name: getattr(sequences, name).to(DEVICE) for name in names}
    table = sequences.block_table.to(DEVICE)
    return Sequences(**tensors, block_table=table, block_size=BLOCK_SIZE)


def check(x, sequences: Sequences, plan: list[PlanRow], rows: int) -> None:
    """Every live flat row is the reference's, every other one is dead."""
    columns = [(row.slot, row.num_query, row.draft_limit, row.samples) for row in plan]
    plan_rows = torch.tensor(columns, dtype=torch.int64, device=sequences.device).view(-1, 4)
    expected = reference.stage(sequences, plan_rows)
    count = len(plan)
    padding = x.slots.shape[0] - count
    for name in ("num_tokens", "num_computed", "num_query", "num_drafts"):
        assert torch.equal(getattr(x, name)[:count].cpu(), expected[name])
    assert x.samples.dtype == torch.bool
    assert x.samples.tolist() == [*expected["samples"].tolist(), *[False] * padding]
    flat = torch.stack((x.token_ids, x.rows.positions, x.rows.slots, x.rows.kv_slots), dim=1)
    wanted = expected["rows"]
    live = torch.stack(
        (expected["token_ids"], wanted.positions, wanted.slots, wanted.kv_slots), dim=1
    )
    starts = expected["row_starts"].tolist()
    dead = torch.tensor([0, 0, sequences.reserved_slot, RESERVED_BLOCK * BLOCK_SIZE])
    for b, window in enumerate(flat.cpu().view(-1, rows, 4)):
        width = starts[b + 1] - starts[b] if b < count else 0
        if b < count:
            assert torch.equal(window[:width], live[starts[b] : starts[b + 1]])
        assert torch.equal(window[width:], dead.expand(rows - width, 4))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_windows(data):
    lengths = []
    for _ in range(SLOTS):
        num_tokens = data.draw(st.integers(1, MAX_LEN - K))
        lengths.append((num_tokens, num_tokens - 1, data.draw(st.integers(0, K))))
    sequences = sequences_of(lengths)
    slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(0, SLOTS))]
    plan = [PlanRow(slot, 1, data.draw(st.integers(0, K)), True) for slot in slots]
    padding = data.draw(st.integers(0 if plan else 1, 2))
    columns = [(r.slot, r.draft_limit, 1) for r in plan]
    columns += [(sequences.reserved_slot, data.draw(st.integers(0, K)), 0)] * padding
    slot, limit, live = torch.tensor(columns, device=DEVICE).T.contiguous().unbind(0)
    x = stage_windows(on_device(sequences), slot, limit, live, K + 1)
    check(x, sequences, plan, K + 1)


@pytest.mark.parametrize("rows", [8, 13, 300])
@pytest.mark.parametrize(("num_query", "samples"), [(1, True), (8, False), (5, True)])
def test_one_chunk(rows, num_query, samples):
    sequences = sequences_of([(3, 2, 1), (20, 20 - num_query if samples else 6, 2)])
    plan = [PlanRow(1, num_query, 0, samples)]
    x = stage_chunks(
        on_device(sequences),
        torch.tensor([1], device=DEVICE),
        torch.tensor([num_query], device=DEVICE),
        torch.tensor([int(samples)], device=DEVICE),
        rows,
    )
    check(x, sequences, plan, rows)


@pytest.mark.parametrize(("slot", "live"), [(SLOTS, True), (2, False)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_padding_sleeps_whichever_way_it_is_named(slot, live, dtype):
    sequences = sequences_of([(9, 8, 2)] * SLOTS)
    slots, lives = (
        torch.tensor([slot], device=DEVICE),
        torch.tensor([live], device=DEVICE, dtype=dtype),
    )
    x = stage_windows(on_device(sequences), slots, slots * 0 + K, lives, K + 1)
    assert x.num_query.item() == 0
    assert x.num_drafts.item() == 0
    assert not x.samples.item()
    assert x.rows.slots.tolist() == [SLOTS] * (K + 1)
    assert x.rows.kv_slots.tolist() == [RESERVED_BLOCK * BLOCK_SIZE] * (K + 1)


def test_without_drafter_a_window_is_one_row():
    sequences = sequences_of([(9, 8, 0), (4, 3, 0)])
    slots, live = torch.tensor([1, 0], device=DEVICE), torch.ones(2, device=DEVICE).long()
    x = stage_windows(on_device(sequences), slots, slots * 0, live, 1)
    check(x, sequences, [PlanRow(1, 1, 0, True), PlanRow(0, 1, 0, True)], 1)


@pytest.mark.usefixtures("poisoned_memory")
def test_every_result_is_written():
    sequences = sequences_of([(9, 8, 2), (7, 6, 3), (20, 4, 0)])
    columns = ([0, 1, SLOTS], [1, 2, K], [1, 1, 0])
    x = stage_windows(
        on_device(sequences), *(torch.tensor(column, device=DEVICE) for column in columns), 7
    )
    check(x, sequences, [PlanRow(0, 1, 1, True), PlanRow(1, 1, 2, True)], 7)
    columns = ([2, SLOTS], [5, 0], [0, 0])
    x = stage_chunks(
        on_device(sequences), *(torch.tensor(column, device=DEVICE) for column in columns), 13
    )
    check(x, sequences, [PlanRow(2, 5, 0, False)], 13)


def test_it_compiles_for_a_gpu(tmp_path):
    code = """
from sametoken.kernels.stage import triton as kernel
from sametoken.state.sequences import Sequences

for options in ({"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}):
    kernel.overlapped = lambda tensor: options
    for batch, k in ((1, 0), (3, 3), (64, 64)):
        sequences = Sequences.allocate(
            max_num_seqs=batch,
            max_len=40,
            num_drafts=k,
            block_size=16,
            reserved_block=9,
            device=torch.device("cpu"),
        )
        slots, amount, flag, _ = torch.zeros(4, batch, dtype=torch.int64).unbind(0)
        kernel.stage_windows(sequences, slots, amount, flag, k + 1)
        kernel.stage_windows(sequences, slots, amount, flag.bool(), k + 1)
        kernel.stage_chunks(sequences, slots, amount, flag, 300)
"""
    compile_launches(code, tmp_path)

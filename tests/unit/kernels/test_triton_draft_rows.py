"""A drafter's rows in one launch: bit for bit the reference's, dead rows included."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from sametoken.kernels.draft_rows import reference, select_draft_rows
from sametoken.kernels.draft_rows import triton as kernels
from sametoken.kernels.draft_rows.layout import CatchUp, Chains
from sametoken.kernels.interface import AttentionRows
from sametoken.state.sequences import Sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN, BLOCK_SIZE = 700, 4


def sequences_of(num_slots: int) -> Sequences:
    """Tokens and blocks that are all different, so that a wrong address shows."""
    sequences = Sequences.allocate(
        max_num_seqs=num_slots,
        max_len=MAX_LEN,
        num_drafts=3,
        block_size=BLOCK_SIZE,
        reserved_block=9999,
        device=DEVICE,
    )
    tokens, table = sequences.token_ids, sequences.block_table
    tokens.copy_(torch.arange(tokens.numel()).view_as(tokens))
    table[:-1] = torch.arange(table[:-1].numel()).view_as(table[:-1]) * 3 + 1
    return sequences


def assert_equal(found, expected) -> None:
    """Every tensor of two dataclasses, in value and in dtype."""
    for field in fields(expected):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, CatchUp | Chains | AttentionRows):
            assert_equal(mine, theirs)
        elif isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


def columns(plan: list[tuple[int, int, int, bool]]) -> list[torch.Tensor]:
    """``plan``: slot, start, end and whether it samples, of each plan row."""
    return [torch.tensor(column, device=DEVICE) for column in zip(*plan, strict=True)]


def check_advanced(sequences, chains: Chains, wanted: Chains, steps: int) -> None:
    for _ in range(steps):
        chains = kernels.advanced(sequences, chains)
        wanted = reference.advanced(sequences, wanted)
        assert_equal(chains, wanted)


def check(sequences, plan: list[tuple[int, int, int, bool]], rows: int, with_newest: bool):
    options = {"rows_per_plan_row": rows, "with_newest": with_newest}
    found = kernels.catch_up(sequences, *columns(plan), **options)
    expected = reference.catch_up(sequences, *columns(plan), **options)
    assert_equal(found, expected)
    check_advanced(sequences, found.chains, expected.chains, steps=3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_windows_with_padding(data):
    num_slots, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    sequences = sequences_of(num_slots)
    plan = []
    for slot in data.draw(st.permutations(range(num_slots))):
        start = data.draw(st.integers(0, MAX_LEN - 20))
        end = start + data.draw(st.integers(1, rows))
        plan.append((slot, start, end, data.draw(st.booleans())))
    padding = (sequences.reserved_slot, 0, 0, False)
    plan += [padding] * data.draw(st.integers(0, 3))
    check(sequences, plan, rows, data.draw(st.booleans()))


@pytest.mark.parametrize("with_newest", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 255, 256, 300])
@pytest.mark.parametrize("samples", [False, True])
def test_chunks(rows, samples, with_newest):
    sequences = sequences_of(4)
    plan = [(2, 5, 5 + rows, samples), (0, 0, max(rows - 3, 1), samples)]
    check(sequences, plan, rows, with_newest)


@pytest.mark.usefixtures("poisoned_memory")
def test_every_result_is_written():
    sequences = sequences_of(3)
    check(sequences, [(1, 7, 9, True), (3, 0, 0, False), (0, 2, 3, False)], 5, with_newest=True)


def test_more_chains_than_one_program_advances():
    sequences = sequences_of(300)
    plan = [(slot, slot, slot + 1, slot % 3 > 0) for slot in range(300)]
    options = {"rows_per_plan_row": 1, "with_newest": False}
    chains = reference.catch_up(sequences, *columns(plan), **options).chains
    check_advanced(sequences, chains, chains, steps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 99, 2050])
@pytest.mark.usefixtures("poisoned_memory")
def test_rows_are_taken(width, dtype):
    states = torch.randn(7, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for rows in ([6, 0, 0, 3], [5], []):
        at = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        found = kernels.take(at, states)
        assert torch.equal(found, reference.take(at, states))
        assert torch.equal(found, states[at])


@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("batch", [1, 6, 300])
@pytest.mark.usefixtures("poisoned_memory")
def test_tokens_are_stacked(batch, k):
    generator = torch.Generator().manual_seed(k)
    tokens = list(torch.randint(2**40, (k, batch), generator=generator).to(DEVICE).unbind(0))
    samples = torch.arange(batch, device=DEVICE) % 3 > 0
    found, expected = kernels.stacked(tokens, samples), reference.stacked(tokens, samples)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype == torch.int64
        assert torch.equal(mine, theirs)


def test_stacking_tokens_compiles_for_a_gpu(tmp_path):
    code = """
from sametoken.kernels.draft_rows import triton as kernels

for options in ({"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}):
    kernels.overlapped = lambda tensor: options
    for batch, k in ((1, 1), (64, 3), (300, 64)):
        tokens = torch.zeros(k, batch, dtype=torch.int64).unbind(0)
        kernels.stacked(tokens, torch.zeros(batch, dtype=torch.bool))
"""
    compile_launches(code, tmp_path)


def test_taking_rows_compiles_for_a_gpu(tmp_path):
    code = """
from sametoken.kernels.draft_rows import triton as kernels

for options in ({"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}):
    kernels.overlapped = lambda tensor: options
    for width in (4096, 99):
        x, rows = torch.zeros(3, width, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
        kernels.take(rows, x)
"""
    compile_launches(code, tmp_path)


def test_a_device_has_its_kernels():
    assert select_draft_rows(torch.device("cpu")) is reference
    assert select_draft_rows(torch.device("cuda")) is kernels

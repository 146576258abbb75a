"""A drafter's rows after a commit: those of lists, bit for bit alike in Triton, dead ones too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned_memory
from helpers.step_scenes import (
    ALL_OPS,
    BLOCK_SIZE,
    DEVICE,
    Scene,
    Slot,
    assert_equal,
    integers,
    row_of,
    scenes,
)
from sametoken.ops.step import compact, reference
from sametoken.ops.step import triton as in_triton
from sametoken.types.layout import StepShape

both = pytest.mark.parametrize("with_newest", [False, True])


def committed(scene: Scene, accepted: list[int]):
    """A step after its commit: sequences, inputs and where each request ends."""
    sequences = scene.sequences(max_len=max(slot.num_tokens for slot in scene.slots) + scene.k + 9)
    x = reference.prepare_inputs(sequences, scene.table(sequences))
    next_token = integers(range(900, 900 + len(x.slots)))
    lengths = reference.commit(sequences, x, integers(scene.by_request(accepted)), next_token)
    return sequences, x, lengths.num_computed


def check(scene: Scene, accepted: list[int], with_newest: bool) -> None:
    sequences, x, end = committed(scene, accepted)
    options = {"end": end, "with_newest": with_newest}
    expected = reference.catch_up(sequences, x, **options)
    check_against_lists(expected, scene, accepted, sequences, with_newest)
    with poisoned_memory():
        found = in_triton.catch_up(sequences, x, **options)
        assert_equal(found, expected)
        chains, wanted = found.chains, expected.chains
        for _ in range(3):
            chains, following = in_triton.advanced(sequences, chains), wanted.following
            wanted = reference.advanced(sequences, wanted)
            assert_equal(chains, wanted)
            assert torch.equal(wanted.rows.positions, following)
            assert torch.equal(wanted.following, following + 1)
            assert torch.equal(wanted.rows.kv_slots, kv_slots_of(sequences, wanted.rows))
    check_compact(compact.catch_up(sequences, x, **options), expected, x, sequences)


def kv_slots_of(sequences, rows):
    blocks = sequences.block_table[rows.slots, rows.positions // BLOCK_SIZE]
    return blocks * BLOCK_SIZE + rows.positions % BLOCK_SIZE


def check_against_lists(found, scene: Scene, accepted, sequences, with_newest: bool) -> None:
    """Live rows request by request in plain Python; all others stand in the reserved slot."""
    rows, tokens = found.rows, sequences.token_ids.tolist()
    at = [t.tolist() for t in (rows.slots, rows.positions, rows.committed, found.token_ids)]
    live, requests = set(), zip(scene.order, scene.rows, accepted, strict=True)
    for (b, row, count), first_row in zip(requests, scene.layout.row_starts, strict=False):
        start = scene.slots[row.slot].num_computed
        end, first = start + row.num_query + count, first_row + b * with_newest
        stop = end + (with_newest and row.samples)
        for i, position in enumerate(range(start, stop), first):
            token = tokens[row.slot][position + (not with_newest)]
            assert [one[i] for one in at] == [row.slot, position, position < end, token]
            live.add(i)
        chains = found.chains
        assert chains.last.index[b] == first + stop - start - 1
        assert chains.last.positions[b] == (stop - 1 if row.samples else 0)
        slot, position = (row.slot, end) if row.samples else (sequences.reserved_slot, 0)
        assert (chains.rows.slots[b], chains.rows.positions[b]) == (slot, position)
        assert chains.last.slots[b] == slot
        assert chains.following[b] == position + 1
    for i in set(range(len(at[0]))) - live:
        assert [one[i] for one in at[:3]] == [sequences.reserved_slot, 0, False]
    assert torch.equal(rows.kv_slots, kv_slots_of(sequences, rows))
    assert not found.chains.rows.committed.any()
    assert torch.equal(found.chains.rows.kv_slots, kv_slots_of(sequences, found.chains.rows))
    # Whatever a chain of padding takes must be there.
    assert bool((found.chains.last.index < len(at[0])).all())


def check_compact(found, static, x, sequences) -> None:
    """The static rows and chains, less dead ones."""
    alive = (static.rows.slots != sequences.reserved_slot).nonzero().squeeze(1)
    assert torch.equal(found.source, alive)
    assert torch.equal(found.token_ids, static.token_ids[alive])
    owner = x.samples.nonzero().squeeze(1)
    assert torch.equal(found.chains.owner, owner)
    last, expected = found.chains.last, static.chains.last
    assert torch.equal(alive[last.index], expected.index[owner])
    assert torch.equal(last.positions, expected.positions[owner])
    assert torch.equal(last.slots, expected.slots[owner])
    assert torch.equal(found.chains.following, static.chains.following[owner])
    for name in ("positions", "slots", "kv_slots", "committed"):
        assert torch.equal(getattr(found.rows, name), getattr(static.rows, name)[alive])
        mine, theirs = getattr(found.chains.rows, name), getattr(static.chains.rows, name)
        assert torch.equal(mine, theirs[owner])
    ahead = compact.advanced(sequences, found.chains)
    wanted = reference.advanced(sequences, static.chains)
    assert torch.equal(ahead.rows.kv_slots, wanted.rows.kv_slots[owner])


@both
@pytest.mark.parametrize("k", [0, 1, 3, 7])
@settings(max_examples=10)
@given(st.data())
def test_ragged_steps(k, with_newest, data):
    scene = data.draw(scenes(k))
    offered = [min(len(scene.slots[row.slot].drafts), row.draft_limit) for row in scene.rows]
    check(scene, [data.draw(st.integers(0, most)) for most in offered], with_newest)


@both
@pytest.mark.parametrize("num_query", [13, 255, 256, 300])
def test_chunks_longer_than_a_program_s_block(num_query, with_newest):
    slots = (Slot(400, 400 - num_query), Slot(400, 3))
    rows = (row_of(0, slots[0], num_query, 0), row_of(1, slots[1], num_query, 0))
    check(Scene(slots, rows, 3, (1, 1, 70, 0)), [0, 0], with_newest)


@both
def test_a_step_of_full_windows_in_a_captured_shape_of_more_requests(with_newest):
    """No dead row lies behind the last request's: padding has none of its own to take."""
    held = Slot(9, 8, (1, 2, 3))
    check(
        Scene((held,), (row_of(0, held, 1, 3),), 3, StepShape(4, 4, 4, 4, 4, 4)), [2], with_newest
    )


def test_more_chains_than_one_program_advances():
    slots = tuple(Slot(slot + 2, slot + 1 if slot % 3 else 0) for slot in range(300))
    rows = tuple(row_of(slot, held, 1, 0) for slot, held in enumerate(slots))
    rows = tuple(sorted(rows, key=lambda row: not row.samples))
    check(Scene(slots, rows, 1), [0] * 300, with_newest=False)


@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("batch", [1, 6, 300])
def test_tokens_are_stacked(batch, k):
    generator = torch.Generator().manual_seed(k)
    tokens = torch.randint(2**40, (k, batch), generator=generator).to(DEVICE)
    samples = torch.arange(batch, device=DEVICE) % 3 > 0
    for ops in ALL_OPS.values():
        with poisoned_memory():
            drafts, counts = ops.stacked(tokens.unbind(0), samples)
        assert torch.equal(drafts, tokens.t())
        assert (drafts.is_contiguous(), counts.dtype) == (True, torch.int64)
        assert torch.equal(counts, samples * k)


def test_known_drafts_are_read_where_that_costs_nothing():
    held = tuple(Slot(9, 8, tuple(range(count))) for count in (3, 0, 2))
    sequences = Scene(held, (row_of(0, held[0], 1, 3),), 3).sequences()
    assert compact.known_drafts(sequences, [2, 0, 1]) == [2, 3, 0]
    assert reference.known_drafts(sequences, [2, 0, 1]) is None
    assert in_triton.known_drafts(sequences, [2, 0, 1]) is None


def test_they_compile_for_a_gpu(tmp_path):
    code = """
from unittest.mock import MagicMock
from sametoken.types.layout import TABLE_ROWS, StepShape
from sametoken.ops.step import triton_drafts, triton_inputs
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import Sequences

# Compiled by test_step_inputs.py.
triton_inputs._prepare_inputs_kernel = MagicMock()
SIZES = ((1, 1), (300, 64))
for options, sizes in (({"PDL": False}, SIZES[:1]), ({"PDL": True, "launch_pdl": True}, SIZES)):
    triton_drafts.pdl_options = lambda tensor: options
    for batch, k in sizes:
        sequences = Sequences.allocate(
            max_num_seqs=batch, max_len=80, num_drafts=k, block_size=16, reserved_block=9,
            device=torch.device("cpu"),
        )
        rows = batch * (k + 1)
        for shape in (
            StepShape(batch, rows, rows, batch, k + 1, k + 1),
            StepShape(batch, 512, batch, 0, 1, 512),
        ):
            table = torch.zeros(TABLE_ROWS, shape.table_width, dtype=torch.int64)
            x = triton_inputs.prepare_inputs(sequences, LayoutTable(table, shape))
            for with_newest in (False, True):
                found = triton_drafts.catch_up(sequences, x, x.slots, with_newest=with_newest)
                triton_drafts.advanced(sequences, found.chains)
        tokens = torch.zeros(k, batch, dtype=torch.int64).unbind(0)
        triton_drafts.stacked(tokens, torch.zeros(batch, dtype=torch.bool))
"""
    compile_launches(code, tmp_path)

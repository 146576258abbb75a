"""A layout filled in: Triton and C find the reference's rows, and all what lists say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned_memory
from helpers.step_scenes import (
    BLOCK_SIZE,
    PADDED_OPS,
    RESERVED_BLOCK,
    Scene,
    Slot,
    assert_equal,
    row_of,
    scenes,
)
from sametoken.ops.backend import RunGroup
from sametoken.ops.step import reference
from sametoken.ops.step import triton as in_triton
from sametoken.types.fast_prompts import ExpandedChunk
from sametoken.types.layout import NO_PLACE, NUM_QUERY, SAMPLES, SLOT, StepShape

DEAD_KV_SLOT = RESERVED_BLOCK * BLOCK_SIZE


def filled(scene: Scene, ops):
    """The reference's inputs and another's, whose memory held garbage before."""
    sequences = scene.sequences()
    before = scene.sequences()
    expected = reference.prepare_inputs(sequences, scene.table(sequences, 7))
    with poisoned_memory():
        found = ops.prepare_inputs(sequences, scene.table(sequences, 7))
    assert_equal(sequences, before)
    return sequences, expected, found


def without_dead_tokens(x, reserved_slot: int):
    """A dead row's token may be any, and so may the row that a dead sampled row is taken of."""
    sampled, dead = x.sampled, x.sampled.slots == reserved_slot
    index = None if sampled.index is None else sampled.index.masked_fill(dead, 0)
    token_ids = x.token_ids.masked_fill(x.rows.slots == reserved_slot, 0)
    return replace(
        x,
        token_ids=token_ids,
        kept=None if index is None else replace(x.kept, index=index),
        sampled=replace(
            sampled, index=index, token_ids=sampled.token_ids.masked_fill(dead, 0)
        ),
    )  # fmt: skip


def check(scene: Scene) -> None:
    for ops in PADDED_OPS.values():
        sequences, expected, found = filled(scene, ops)
        for x in (expected, found):
            # Whatever a dead row holds is embedded, and taken.
            assert bool((x.token_ids >= 0).all())
            assert bool((x.token_ids < 10**6).all())
            if x.sampled.index is not None:
                assert bool((x.sampled.index >= 0).all())
                assert bool((x.sampled.index < max(scene.shape.num_rows, 1)).all())
        reserved = sequences.reserved_slot
        assert_equal(without_dead_tokens(found, reserved), without_dead_tokens(expected, reserved))
    check_against_lists(expected, scene, sequences)


def check_against_lists(x, scene: Scene, sequences) -> None:
    """The reference, row by row in plain Python."""
    row, place, table = 0, 0, sequences.block_table.tolist()
    slots, positions, kv_slots = (
        t.tolist() for t in (x.rows.slots, x.rows.positions, x.rows.kv_slots)
    )
    tokens, committed, sampled = x.token_ids.tolist(), x.rows.committed.tolist(), x.sampled
    of_step = [*range(scene.shape.num_rows)] if sampled.index is None else sampled.index.tolist()
    for b, plan in zip(scene.order, scene.rows, strict=True):
        held = scene.slots[plan.slot]
        offered = held.drafts[: plan.draft_limit] if plan.samples else ()
        assert x.num_drafts[b] == len(offered)
        assert x.num_proposed[b] == (len(held.drafts) if plan.samples else 0)
        first = row
        for offset in range(plan.num_query + plan.draft_limit):
            live = offset < plan.num_query + len(offered)
            position = held.num_computed + offset if live else 0
            slot = plan.slot if live else sequences.reserved_slot
            block = table[slot][position // BLOCK_SIZE]
            assert (slots[row], positions[row]) == (slot, position)
            assert kv_slots[row] == block * BLOCK_SIZE + position % BLOCK_SIZE
            assert committed[row] == (offset < plan.num_query)
            if offset < plan.num_query:
                assert tokens[row] == 1000 * plan.slot + position
            elif live:
                assert tokens[row] == offered[offset - plan.num_query]
            row += 1
        for offset in range(plan.draft_limit + 1 if plan.samples else 0):
            at = first + plan.num_query - 1 + offset
            assert (of_step[place], int(sampled.offsets[place])) == (at, offset)
            assert (sampled.slots[place], sampled.positions[place]) == (slots[at], positions[at])
            if offset <= len(offered):
                assert sampled.token_ids[place] == tokens[at]
            place += 1
    if not scene.shape.all_sampled:
        check_kept(x)
    for b in set(range(scene.shape.num_requests)) - {*scene.order}:
        facts = (x.num_query, x.num_proposed, x.num_drafts, x.samples, x.num_tokens)
        assert (x.slots[b], x.places[b]) == (sequences.reserved_slot, NO_PLACE)
        assert not any(fact[b] for fact in facts)
    padding = slice(row, None)
    assert set(slots[padding]) <= {sequences.reserved_slot}
    assert set(positions[padding]) <= {0}
    assert set(kv_slots[padding]) <= {DEAD_KV_SLOT}
    assert not any(committed[padding])
    assert set(sampled.slots[place:].tolist()) <= {sequences.reserved_slot}
    assert set(sampled.positions[place:].tolist()) <= {0}


def check_kept(x) -> None:
    """The sampled rows, each request's a run."""
    kept, sampled = x.kept, x.sampled
    for name in ("index", "positions", "slots"):
        assert torch.equal(getattr(kept, name), getattr(sampled, name))
    assert torch.equal(kept.runs.starts, x.window_starts)
    (group,) = kept.runs.groups or (RunGroup(0, len(x.slots), 0),)
    assert (group.first, group.num_runs) == (0, len(x.slots))
    assert group.max_rows >= int(x.window_starts.diff().max())


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@settings(max_examples=16)
@given(st.data())
def test_ragged_steps(k, data):
    check(data.draw(scenes(k)))


#: One window, of whose drafts a part is offered, and one chunk.
FEW = (Slot(9, 8, (5, 6, 7)), Slot(20, 4))


@pytest.mark.parametrize("ops", PADDED_OPS.values(), ids=PADDED_OPS)
def test_no_row_is_dropped_where_all_states_are_wanted(ops):
    scene = Scene(FEW, (row_of(0, FEW[0], 1, 2), row_of(1, FEW[1], 16, 0)), 3)
    sequences = scene.sequences()
    layout = scene.table(sequences)
    assert ops.prepare_inputs(sequences, layout).kept is not None
    whole = replace(layout, shape=replace(layout.shape, all_states=True))
    assert ops.prepare_inputs(sequences, whole).kept is None


def test_rows_of_expanded_prompts_stand_apart():
    """Kernels are compiled for aligned memory: a chunk's positions may begin at any row."""
    slots = (Slot(9, 8), Slot(20, 4), Slot(24, 5))
    rows = (row_of(0, slots[0], 1, 0), row_of(1, slots[1], 8, 0), row_of(2, slots[2], 6, 0))
    scene = Scene(slots, rows, 0)
    sequences = scene.sequences()
    layout = scene.table(sequences)
    expanded = (ExpandedChunk(2, first_row=9, num_rows=6, stop=11),)
    layout = replace(layout, shape=replace(layout.shape, expanded=expanded))
    x = reference.prepare_inputs(sequences, layout)
    found = layout.with_expanded(x.rows, BLOCK_SIZE).expanded
    assert found.others.positions.tolist() == [8, *range(4, 12)]
    assert found.others.runs.starts.tolist() == [0, 1, 9, 9]
    (chunk,) = found.chunks
    assert found.chunks is found.chunks
    assert chunk.rows == slice(9, 15)
    assert chunk.stop == 11
    assert chunk.queries.positions.tolist() == [*range(5, 11)]
    assert chunk.queries.positions.data_ptr() % 16 == 0
    assert chunk.blocks.tolist() == sequences.block_table[2, : -(-11 // BLOCK_SIZE)].tolist()
    assert layout.with_expanded(x.rows, BLOCK_SIZE).positions is x.rows.positions


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (StepShape(4, 8, 8, 4, 4, 4), (row_of(0, FEW[0], 1, 2),)),
        (StepShape(4, 4, 4, 4, 1, 1), (row_of(0, FEW[0], 1, 0),)),
        (StepShape(6, 64, 10, 4, 4, 64), (row_of(0, FEW[0], 1, 3), row_of(1, FEW[1], 16, 0))),
        (StepShape(6, 64, 10, 4, 4, 64), (row_of(0, FEW[0], 1, 3),)),
        (StepShape(1, 17, 1, 0, 4, 17), (row_of(1, FEW[1], 16, 0),)),
    ],
)
def test_steps_in_captured_shapes(shape, rows):
    check(Scene(FEW, rows, 3, shape))


@pytest.mark.parametrize("num_query", [127, 128, 129, 300])
def test_chunks_longer_than_a_program_s_block(num_query):
    slots = (Slot(400, 400 - num_query), Slot(400, 3))
    rows = (row_of(0, slots[0], num_query, 0), row_of(1, slots[1], num_query, 0))
    check(Scene(slots, rows, 3, (1, 1, 200, 40)))


def test_a_window_of_many_drafts():
    slots = (Slot(9, 8, tuple(range(64))), Slot(3, 2, tuple(range(40))), Slot(2, 1))
    rows = tuple(row_of(slot, held, 1, 64) for slot, held in enumerate(slots))
    check(Scene(slots, rows, 64, (2, 1, 9, 9)))


@pytest.mark.parametrize("ops", PADDED_OPS.values(), ids=PADDED_OPS)
@pytest.mark.parametrize("stale", [NUM_QUERY, SLOT])
def test_padding_sleeps_whichever_way_it_is_named(stale, ops):
    """The reserved slot with another request's counts, or a request's slot with none."""
    scene = Scene(
        (Slot(9, 8, (1, 2)),) * 3, (row_of(0, Slot(9, 8, (1, 2)), 1, 2),), 2, (1, 0, 3, 3)
    )
    sequences = scene.sequences()
    layout = scene.table(sequences)
    if stale == SLOT:
        layout.table[SLOT, 1] = 2
    elif ops is in_triton:
        layout.table[NUM_QUERY, 1] = layout.table[SAMPLES, 1] = 1
    x = ops.prepare_inputs(sequences, layout)
    assert x.num_drafts.tolist() == [2, 0]
    assert x.samples.tolist() == [True, False]
    assert x.rows.slots.tolist() == [0] * 3 + [3] * 3
    ops.commit(sequences, x, x.num_drafts * 0, x.num_drafts * 0 + 4)
    assert sequences.num_tokens.tolist() == [10, 9, 9, 0]
    assert sequences.num_computed.tolist() == [9, 8, 8, 0]


def test_it_compiles_for_a_gpu(tmp_path):
    code = """
from sametoken.types.layout import TABLE_ROWS, StepShape
from sametoken.ops.step import triton_inputs
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import Sequences

SIZES = ((1, 0), (3, 64))
for options, sizes in (({"PDL": False}, SIZES[:1]), ({"PDL": True, "launch_pdl": True}, SIZES)):
    triton_inputs.pdl_options = lambda tensor: options
    for batch, k in sizes:
        rows = batch * (k + 1)
        sequences = Sequences.allocate(
            max_num_seqs=batch, max_len=40, num_drafts=k, block_size=16, reserved_block=9,
            device=torch.device("cpu"),
        )
        windows = StepShape(batch, rows, rows, batch, k + 1, k + 1)
        mixed = StepShape(batch + 1, 512, rows, batch, k + 1, 512)
        for shape in (windows, mixed):
            table = torch.zeros(TABLE_ROWS, shape.table_width, dtype=torch.int64)
            triton_inputs.prepare_inputs(sequences, LayoutTable(table, shape))
"""
    compile_launches(code, tmp_path)

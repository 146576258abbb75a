"""Layouts from the host and results to it: each at its place, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from helpers.poisoned import poisoned_memory
from helpers.step_scenes import (
    DEVICE,
    PADDED_OPS,
    Scene,
    Slot,
    integers,
    row_of,
    scenes,
)
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.types import NUM_COUNTS, VerifyResult
from sametoken.types.layout import NO_PLACE, PLACE

ON_GPU = torch.cuda.is_available()
UNTOUCHED = -(10**9)
each_op = pytest.mark.parametrize("ops", PADDED_OPS.values(), ids=PADDED_OPS)


def host_memory(*shape: int) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=torch.int64, pin_memory=ON_GPU)


def verified_of(scene: Scene) -> VerifyResult:
    """Numbers that are all different; as many drafts accepted as there are."""
    accepted = [min(len(scene.slots[row.slot].drafts), row.draft_limit) for row in scene.rows]
    tokens = torch.arange(scene.shape.num_sampled, device=DEVICE) + 100
    numbers = torch.arange(scene.shape.num_requests, device=DEVICE)
    accepted = integers(scene.by_request(accepted))
    return VerifyResult(tokens, accepted, numbers + 50, numbers + 70)


def expected_results(scene: Scene, verified: VerifyResult, first_place: int):
    """By place: the counts, and the tokens that mean something."""
    starts = scene.layout.window_starts
    for b, row in enumerate(scene.rows):
        drafts = len(scene.slots[row.slot].drafts) if row.samples else 0
        at = scene.order[b]
        offered, accepted = min(drafts, row.draft_limit), int(verified.num_accepted[at])
        emitted = range(starts[b] + 100, starts[b] + 101 + accepted) if row.samples else ()
        yield first_place + b, [41, offered, drafts, accepted, 70 + at, *emitted]


def check(scene: Scene, ops, first_place: int) -> None:
    sequences, verified = scene.sequences(), verified_of(scene)
    x = ops.prepare_inputs(sequences, scene.table(sequences, first_place))
    results = host_memory(first_place + len(scene.rows) + 2, NUM_COUNTS + scene.k + 1)
    with poisoned_memory():
        ops.deliver(x, verified, results)
    if ON_GPU:
        torch.cuda.synchronize()
    found = results.tolist()
    for place, wanted in expected_results(scene, verified, first_place):
        assert found[place][: len(wanted)] == wanted
        found[place] = []
    # Padding is delivered nowhere.
    assert all(number == UNTOUCHED for row in found for number in row)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@each_op
@settings(max_examples=10)
@given(st.data())
def test_results_go_to_their_places(ops, k, data):
    check(data.draw(scenes(k)), ops, data.draw(st.integers(0, 3)))


@each_op
def test_a_big_window_is_delivered_whole(ops):
    held = Slot(9, 8, tuple(range(64)))
    check(Scene((held,) * 2, (row_of(1, held, 1, 64), row_of(0, held, 1, 64)), 64), ops, 1)


@each_op
def test_a_result_for_which_nobody_waits_is_written_nowhere(ops):
    held = Slot(9, 8, (1, 2, 3))
    scene = Scene((held,) * 2, (row_of(1, held, 1, 3), row_of(0, held, 1, 3)), 3)
    sequences, layout = scene.sequences(), scene.table(scene.sequences())
    layout.table[PLACE, 0] = NO_PLACE
    memory = host_memory(4, NUM_COUNTS + 4)
    ops.deliver(ops.prepare_inputs(sequences, layout), verified_of(scene), memory[1:])
    if ON_GPU:
        torch.cuda.synchronize()
    written = (memory != UNTOUCHED).any(dim=1)
    assert written.tolist() == [False, False, True, False]


@pytest.mark.parametrize("results", [host_memory(1, 8), host_memory(9, 2).t()[:1]])
def test_results_of_the_wrong_size_or_strided_are_refused(results):
    held = Slot(9, 8, (1, 2, 3))
    scene = Scene((held,), (row_of(0, held, 1, 3),), 3)
    sequences = scene.sequences()
    x = in_triton.prepare_inputs(sequences, scene.table(sequences))
    with pytest.raises(AssertionError):
        in_triton.deliver(x, verified_of(scene), results)


@each_op
@pytest.mark.parametrize("size", [1, 5, 24])
def test_turns_go_round_the_entries(size, ops):
    entries = host_memory(3, 24)
    entries.copy_(torch.arange(3 * 24).view(3, 24))
    turn = torch.full((1,), 2, dtype=torch.int64, device=DEVICE)
    for entry in (2, 0, 1, 2):
        memory = torch.full((size + 3,), UNTOUCHED, dtype=torch.int64, device=DEVICE)
        ops.fetch(entries, turn, memory[:size])
        assert torch.equal(memory[:size].cpu(), entries[entry, :size])
        assert (memory[size:] == UNTOUCHED).all()
    assert turn.item() == 6


def test_launches_compile_for_a_gpu(tmp_path):
    code = """
from types import SimpleNamespace
from sametoken.ops.step import triton_inputs as triton_transfer
from sametoken.ops.step.types import VerifyResult

for pdl in ({"PDL": False}, {"PDL": True, "launch_pdl": True}):
    triton_transfer.pdl_options = lambda tensor, options=pdl: options
    for batch, k in ((1, 0), (64, 3), (8, 64)):
        table = torch.zeros(8, batch + 1, dtype=torch.int64)
        triton_transfer.fetch(torch.zeros(4, 800, dtype=torch.int64), table[0, :1].clone(), table)
        one = torch.zeros(batch, dtype=torch.int64)
        x = SimpleNamespace(
            slots=one, step_ids=one, places=one, num_drafts=one, num_proposed=one,
            window_starts=table[0], num_speculative_tokens=k,
        )
        tokens = torch.zeros(batch * (k + 1), dtype=torch.int64)
        results = torch.zeros(128, 6 + k, dtype=torch.int64)
        triton_transfer.deliver(x, VerifyResult(tokens, one, one, one), results)
"""
    compile_launches(code, tmp_path)

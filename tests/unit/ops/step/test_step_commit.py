"""Verify, commit and publish: what loops say, in the reference and in Triton."""

from __future__ import annotations

from dataclasses import replace

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
    assert_equal,
    integers,
    row_of,
    scenes,
)
from sametoken.ops.sampling.sample import make_keys
from sametoken.ops.step import reference
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.types import HAS_NAN, NO_TOKEN, SOUND, Chances

RATES = torch.tensor([0.8, 0.5, 0.9, 0.95, 0.7, 0.99, 0.6])
SEEDS = integers([7, 2**63 - 1, 0, 123456789, 5, 11])


def keys_of(targets: list[int], nan: set[int], blocked: set[int], tiles: int = 1) -> torch.Tensor:
    """Keys [L, tiles] whose best are ``targets``, in a tile that follows from the row."""
    rows = len(targets)
    values = torch.full((rows, tiles), -3.0)
    token_ids = torch.arange(tiles).expand(rows, tiles).clone()
    at = torch.arange(rows) % tiles
    values[range(rows), at] = 2.0
    token_ids[range(rows), at] = torch.tensor(targets, dtype=torch.int64)
    values[sorted(nan), at[sorted(nan)]] = torch.nan
    for row in blocked:
        values[row], token_ids[row] = -torch.inf, targets[row]
    return make_keys(values, token_ids).to(DEVICE)


def by_hand(drafts, targets: list[int], nan: set[int], blocked: set[int]) -> tuple[int, int]:
    """Accepted drafts and the fault of one window, in plain Python."""
    accepted = 0
    while (
        accepted < len(drafts)
        and not {accepted, accepted + 1} & (nan | blocked)
        and drafts[accepted] == targets[accepted]
    ):
        accepted += 1
    return accepted, NO_TOKEN if 0 in blocked else HAS_NAN if 0 in nan else SOUND


def splitmix(seed: int, position: int) -> float:
    """SplitMix64's word number ``position`` from ``seed``, in Python's own integers."""
    mask = (1 << 64) - 1
    word = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return ((word >> 40) & 0xFFFFFF) / 2**24


def drawn(seed: int, num_tokens: int, num_drafts: int) -> int:
    """Drafts that are accepted by chance, in plain Python."""
    for index in range(num_drafts):
        if splitmix(seed, num_tokens + index) >= float(RATES[index]):
            return index
    return num_drafts


def expected_verified(scene: Scene, targets, nan, blocked, by_chance: bool):
    """By request: accepted drafts, next token, fault, and its window's tokens."""
    start = 0
    for row in scene.rows:
        held, width = scene.slots[row.slot], row.draft_limit + 1 if row.samples else 0
        own = range(start, start + width)
        start += width
        if not row.samples:
            yield 0, 0, SOUND, []
            continue
        drafts = held.drafts[: row.draft_limit]
        bad = ({r - own[0] for r in rows if r in own} for rows in (nan, blocked))
        said = targets[own[0] : own[-1] + 1]
        accepted, fault = by_hand(drafts, said, *bad)
        if by_chance:
            accepted = drawn(int(SEEDS[row.slot]), held.num_tokens, len(drafts))
        if fault != SOUND:
            yield 0, 0, fault, said
        else:
            emitted = [*drafts[:accepted], *said[accepted:]] if by_chance else said
            yield accepted, said[accepted], SOUND, emitted


def check(scene: Scene, outcome, by_chance: bool = False) -> None:
    """One step by every implementation: what lists say, in every slot and nowhere else."""
    targets, nan, blocked, tiles = outcome
    keys = keys_of(targets, nan, blocked, tiles)
    chances = Chances(RATES[: scene.k].to(DEVICE), SEEDS) if by_chance else None
    wanted = [*expected_verified(scene, targets, nan, blocked, by_chance)]
    batch = scene.shape.num_requests
    draft_ids = torch.arange(batch * scene.k, device=DEVICE).view(batch, scene.k)
    counts = integers([b % (scene.k + 1) for b in range(batch)])
    results = []
    for ops in PADDED_OPS.values():
        sequences = scene.sequences()
        with poisoned_memory():
            x = ops.prepare_inputs(sequences, scene.table(sequences))
            verified = ops.verify(keys, x, chances)
            check_verified(verified, wanted, scene)
            lengths = ops.commit(sequences, x, verified.num_accepted, verified.next_token)
            check_committed(sequences, scene, wanted)
            ops.publish(sequences, x, draft_ids, counts)
            check_published(sequences, scene, draft_ids, counts)
        # Of rows in no window tokens are undefined.
        tokens = verified.tokens[: scene.layout.window_starts[-1]]
        results.append((lengths, sequences, replace(verified, tokens=tokens)))
    first, *others = results
    for found in others:
        for mine, theirs in zip(found, first, strict=True):
            assert_equal(mine, theirs)


def check_verified(verified, wanted, scene: Scene) -> None:
    starts = scene.layout.window_starts
    accepted, next_tokens, faults, windows = zip(*wanted, strict=True)
    assert verified.num_accepted.tolist() == scene.by_request(accepted)
    assert verified.next_token.tolist() == scene.by_request(next_tokens)
    assert verified.faults.tolist() == scene.by_request(faults)
    for start, tokens in zip(starts, windows, strict=False):
        assert verified.tokens[start : start + len(tokens)].tolist() == tokens


def check_committed(sequences, scene: Scene, wanted) -> None:
    by_slot = {row.slot: (row, *one) for row, one in zip(scene.rows, wanted, strict=True)}
    untouched = scene.sequences()
    for slot, held in enumerate(scene.slots):
        tokens = untouched.token_ids[slot].tolist()
        num_tokens, num_computed = held.num_tokens, held.num_computed
        if slot in by_slot:
            row, accepted, next_token, *_ = by_slot[slot]
            num_computed += row.num_query + accepted
            if row.samples:
                emitted = [*held.drafts[:accepted], next_token]
                tokens[num_tokens : num_tokens + len(emitted)] = emitted
                num_tokens += len(emitted)
        assert sequences.token_ids[slot].tolist() == tokens
        assert sequences.num_tokens[slot] == num_tokens
        assert sequences.num_computed[slot] == num_computed
    for name in ("token_ids", "num_tokens", "num_computed"):
        assert not getattr(sequences, name)[-1].any()
    for name in ("draft_ids", "num_drafts", "block_table"):
        assert_equal(getattr(sequences, name), getattr(untouched, name))


def check_published(sequences, scene: Scene, draft_ids, counts) -> None:
    untouched = scene.sequences()
    num_drafts, held = untouched.num_drafts.tolist(), untouched.draft_ids.tolist()
    for b, row in zip(scene.order, scene.rows, strict=True):
        num_drafts[row.slot] = int(counts[b]) if row.samples and scene.k else 0
        held[row.slot] = draft_ids[b].tolist()
    assert sequences.num_drafts.tolist() == num_drafts
    assert sequences.draft_ids.tolist() == held


@st.composite
def outcomes(draw, scene: Scene):
    """Targets, NaN rows and blocked rows of a step's sampled rows, and tiles of its keys."""
    count = scene.shape.num_sampled
    rows = st.sets(st.integers(0, max(count - 1, 0)), max_size=2 if count else 0)
    targets = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    nan, blocked = draw(rows), draw(rows)
    return targets, nan - blocked, blocked, draw(st.integers(1, 3))


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@settings(max_examples=12)
@given(st.data())
def test_ragged_steps(k, data):
    scene = data.draw(scenes(k))
    check(scene, data.draw(outcomes(scene)))


@pytest.mark.parametrize("k", [1, 3, 7])
@settings(max_examples=12)
@given(st.data())
def test_ragged_steps_judged_by_chance(k, data):
    scene = data.draw(scenes(k))
    check(scene, data.draw(outcomes(scene)), by_chance=True)


def window_of(k: int, drafts, slots: int = 1, room=(1, 0, 2, 2)) -> Scene:
    held = Slot(9, 8, tuple(drafts))
    return Scene((held,) * slots, tuple(row_of(s, held, 1, k) for s in range(slots)), k, room)


def test_many_tiles_and_wide_windows_are_walked_whole():
    """More tiles than one pass holds: the best may lie in any of them."""
    scene = window_of(64, [1] * 64, slots=2)
    rows = scene.shape.num_sampled
    for wrong in (0, 31, 63, 64):
        targets = [1] * rows
        targets[wrong], targets[65 + wrong] = 2, 0
        check(scene, (targets, set(), set(), 70))


def test_nan_in_a_rejected_row_harms_nobody():
    """A wrong draft may lead the target anywhere; plain decoding would never see that row."""
    scene = window_of(3, (1, 5, 3), room=(0, 0, 0, 0))
    assert by_hand((1, 5, 3), [1, 2, 0, 0], {2, 3}, set()) == (1, SOUND)
    check(scene, ([1, 2, 0, 0], {2, 3}, set(), 1))
    check(scene, ([1, 2, 0, 0], {3}, {2}, 1))
    check(scene, ([1, 2, 0, 0], set(), {2, 3}, 1))


@pytest.mark.parametrize("fault", [HAS_NAN, NO_TOKEN])
def test_a_draft_before_a_row_with_a_fault_is_emitted_as_the_next_token(fault):
    """So a request fails after the same tokens, with drafts or without."""
    scene, targets = window_of(3, (1, 2, 0), room=(0, 0, 0, 0)), [1, 2, 0, 0]
    for rows in ({0}, {1}, {2}, {3}, {0, 1}, {1, 3}):
        bad = (rows, set()) if fault == HAS_NAN else (set(), rows)
        accepted = max(min(rows) - 1, 0)
        assert by_hand((1, 2, 0), targets, *bad) == (
            accepted,
            fault if 0 in rows else SOUND,
        )
        check(scene, (targets, *bad, 2))


def test_rows_behind_the_last_window_judge_nobody():
    """There no padding request stands between."""
    scene = window_of(3, (1, 2, 0), room=(0, 0, 2, 2))
    for nan, blocked in (({4}, {5}), ({5}, {4}), (set(), set())):
        check(scene, ([1, 2, 0, 0, 2, 2], nan, blocked, 1))


def test_the_noise_fills_its_range_evenly():
    noise = reference.uniform(torch.arange(100)[:, None], torch.arange(1000))
    counts = torch.histc(noise, bins=10, min=0, max=1)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert counts.min() > 0.97 * noise.numel() / 10


@settings(max_examples=60)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_the_noise_is_splitmix_at_the_drafts_position(seed, position):
    drawn_there = reference.uniform(torch.tensor([seed]), torch.tensor([position]))
    assert drawn_there.item() == splitmix(seed, position)


def test_strided_keys_and_drafts_are_refused():
    scene = window_of(3, (1, 2, 3))
    sequences = scene.sequences()
    x = in_triton.prepare_inputs(sequences, scene.table(sequences))
    with pytest.raises(AssertionError):
        in_triton.verify(keys_of([1] * 6, set(), set(), 2)[:, :1], x)
    with pytest.raises(AssertionError):
        in_triton.publish(sequences, x, torch.zeros(3, 2).long().t(), x.slots)


def test_they_compile_for_a_gpu(tmp_path):
    code = """
from unittest.mock import MagicMock
from sametoken.types.layout import TABLE_ROWS, StepShape
from sametoken.ops.step import triton_commit, triton_inputs
from sametoken.ops.step.types import Chances, LayoutTable
from sametoken.state.sequences import Sequences

# Compiled by test_step_inputs.py.
triton_inputs._prepare_inputs_kernel = MagicMock()
SIZES = ((1, 1, 1), (3, 64, 149))
for options, sizes in (({"PDL": False}, SIZES[:1]), ({"PDL": True, "launch_pdl": True}, SIZES)):
    triton_commit.pdl_options = lambda tensor: options
    for batch, k, tiles in sizes:
        sequences = Sequences.allocate(
            max_num_seqs=batch, max_len=80, num_drafts=k, block_size=16, reserved_block=9,
            device=torch.device("cpu"),
        )
        rows = batch * (k + 1)
        shape = StepShape(batch, rows, rows, batch, k + 1, k + 1)
        table = torch.zeros(TABLE_ROWS, shape.table_width, dtype=torch.int64)
        x = triton_inputs.prepare_inputs(sequences, LayoutTable(table, shape))
        keys = torch.zeros(rows, tiles, dtype=torch.int64)
        for chances in (None, Chances(torch.zeros(k), sequences.num_tokens)):
            verified = triton_commit.verify(keys, x, chances)
        triton_commit.commit(sequences, x, verified.num_accepted, verified.next_token)
        triton_commit.publish(sequences, x, sequences.draft_ids[:batch], x.slots)
"""
    compile_launches(code, tmp_path)

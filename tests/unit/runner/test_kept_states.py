"""A kept state goes on with the bits of the slot that left it, wherever the windows fell."""

from __future__ import annotations

import pytest
import torch

from helpers.recurrent import Slots
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import PagedKV, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.triton import TritonPass
from sametoken.ops.native.backend import NativeKernels
from sametoken.runner.kept_states import CacheStates, KeptStateStore
from sametoken.state.caches import ModelCache
from sametoken.types.plan import StateCopy, StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULE = GatedDelta(1, 2, key_dim=3, value_dim=5, conv_kernel=4)
K = 3
CHANNELS, HEADS = RULE.conv_channels, RULE.num_value_heads
PASSES = {
    "reference": RowByRowPass.begin,
    "native": NativeKernels().begin_pass,
    "triton": TritonPass.begin,
}
CHUNK = 5
NUM_TOKENS = 20


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


PARAMS = GatedDeltaParams(RULE, random(HEADS), random(HEADS), random(4, CHANNELS), None)
RAW = random(NUM_TOKENS, CHANNELS + 2 * HEADS, seed=1)
WRONG = random(NUM_TOKENS, CHANNELS + 2 * HEADS, seed=2)


def slots(begin) -> Slots:
    return Slots(Recurrent(RULE, torch.float32), K, begin_pass=begin, device=DEVICE)


def run(held: Slots, slot: int, first: int, raw: torch.Tensor, num_committed: int) -> torch.Tensor:
    count = len(raw)
    at = torch.full((count,), slot, device=DEVICE)
    rows = AttentionRows(
        torch.arange(first, first + count, device=DEVICE),
        at,
        at,
        at[None],
        RowRuns.even(1, count),
        torch.arange(count, device=DEVICE) < num_committed,
    )
    running = held.begin(rows)
    out = held.run(running, 0, PARAMS, *raw.split((CHANNELS, HEADS, HEADS), dim=-1))
    running.finish()
    return out


def left_by_windows(held: Slots, states: CacheStates, copy: StateCopy, accepted: list[int]) -> None:
    """A chunk, and windows of K drafts of which some are accepted; each may keep the state."""
    run(held, copy.slot, 0, RAW[:CHUNK], CHUNK)
    end = CHUNK
    for num_accepted in accepted:
        drafts = torch.cat((RAW[end + 1 :][:num_accepted], WRONG[: K - num_accepted]))
        run(held, copy.slot, end, torch.cat((RAW[end : end + 1], drafts)), 1)
        end += 1 + num_accepted
        states.keep(copy, torch.full_like(held.position, end))


@pytest.mark.parametrize(
    ("begin", "position"),
    [
        *((begin, position) for begin in ("reference", "native") for position in range(6, 11)),
        ("triton", 8),
    ],
)
def test_it_goes_on_from_every_position_that_windows_pass(begin, position):
    """Windows end at 9, 10 and 14: the position is a window's first, inside it, or its last."""
    held, plain = slots(PASSES[begin]), slots(PASSES[begin])
    states = CacheStates.allocate(held.cache, held.folded, num_states=2)
    for memory in states.kept:
        memory.fill_(float("nan"))
    left_by_windows(held, states, StateCopy(0, position, 1), [K, 0, K])
    states.restore(StateCopy(2, position, 1))
    assert int(held.position[2] + held.folded.num_pending[2]) == position
    expected = run(plain, 0, 0, RAW[: position + 4], position + 4)
    found = run(held, 2, position, RAW[position : position + 4], 4)
    assert torch.equal(found, expected[position:])
    assert torch.equal(held.states[:, 2], plain.states[:, 0])
    assert torch.equal(held.history[:, 2], plain.history[:, 0])
    assert held.position.tolist()[2] == position + 4
    # Nothing was kept elsewhere but what nobody wanted.
    assert all(memory[:, 0].isnan().all() for memory in states.kept)


def test_what_a_step_does_not_reach_is_not_kept():
    held = slots(PASSES["reference"])
    states = CacheStates.allocate(held.cache, held.folded, num_states=1)
    for memory in states.kept:
        memory.fill_(float("nan"))
    for position in (3, 4, 12):
        left_by_windows(held, states, StateCopy(0, position, 0), [1, K])
    assert states.kept[0][:, 0].isnan().all()
    assert not states.kept[0][:, 1].isnan().any()


@pytest.mark.parametrize("num_states", [0, 2])
def test_caches_without_recurrent_layers_have_no_states(num_states):
    sizes = {"num_blocks": 1, "block_size": 4, "max_num_seqs": 2, "num_drafts": K}
    dense, hybrid = (
        ModelCache.allocate((one,), **sizes, device=DEVICE)
        for one in (PagedKV(1, 2, 2, torch.float32), Recurrent(RULE, torch.float32))
    )
    states = KeptStateStore((dense, hybrid), num_states)
    assert [one.slots for one in states.caches] == ([hybrid.slots] if num_states else [])
    states.restore(StepPlan(0))
    states.keep(StepPlan(0), hybrid.folded.position)

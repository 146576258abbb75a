"""Mamba-2's kernels: the reference's rows, and the same bits in every window and batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from helpers.compiled import compile_launches, orders_of_sums
from helpers.recurrent import Slots, begin_as_on_a_gpu, params_of
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model import activation, activation_triton, norm_rope, norm_triton
from sametoken.ops.model.mamba2 import hopper, triton
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent import hopper as hopper_runs
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.runs import Runs
from sametoken.ops.model.recurrent.triton import TritonPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 3


def spec_of(heads=2, dim=3, groups=1, size=5, taps=4, dtype=torch.float32) -> Recurrent:
    return Recurrent(Mamba2(heads, dim, groups, size, taps), dtype)


SPECS = [
    spec_of(),
    spec_of(4, 8, 2, 4, taps=2),
    spec_of(3, 5, 3, 16, taps=3, dtype=torch.bfloat16),
    spec_of(1, 4, 1, 4, taps=1),
]


@dataclass(frozen=True)
class Part:
    """Rows of one slot from ``first`` on; inputs follow from a row's place and the seed."""

    slot: int
    first: int
    num_committed: int
    num_drafts: int = 0
    seed: int = 0

    @property
    def rows(self) -> list[tuple[int, int, bool, int]]:
        """Slot, position, whether it is committed, and the seed of its inputs."""
        places = range(self.first, self.first + self.num_committed + self.num_drafts)
        base = 1000 * self.slot + 10**6 * self.seed
        return [(self.slot, p, p < self.first + self.num_committed, base + p) for p in places]


DEAD = (SLOTS, 0, False, -1)


def run(cache: Slots, parts: list[Part], window: int | None = None) -> list[torch.Tensor]:
    """One pass; runs are padded to ``window`` with dead rows, or ragged, one dead row behind."""
    spec, own = cache.declared, [part.rows for part in parts]
    if window is None:
        cut = [*own[:-1], [*own[-1], DEAD]]
        runs = runs_of([len(rows) for rows in cut], 1, DEVICE)
    else:
        cut = [[*rows, *[DEAD] * (window - len(rows))] for rows in [*own, []]]
        runs = RowRuns.even(len(cut), window)
    facts = [fact for rows in cut for fact in rows]
    slots, positions, committed = (
        torch.tensor([fact[i] for fact in facts], device=DEVICE) for i in range(3)
    )
    width = spec.rule.conv_channels + sum(spec.rule.gate_sizes) + 3
    raw = torch.full((len(facts), width), float("nan"))
    for place, (_, _, _, seed) in enumerate(facts):
        if seed >= 0:
            raw[place] = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    sizes = (spec.rule.conv_channels, 3, *spec.rule.gate_sizes)
    mixed, _, dt = raw.to(DEVICE, spec.dtype).split(sizes, dim=-1)
    running = cache.begin(AttentionRows(positions, slots, slots, slots[None], runs, committed))
    out = cache.run(running, 0, params_of(spec, limit=(0.05, 2.0), device=DEVICE), mixed, dt)
    running.finish()
    found, at = [], 0
    for rows, padded in zip(own, cut, strict=False):
        found.append(out[at : at + len(rows)])
        at += len(padded)
    return found


def empty(spec: Recurrent, num_drafts: int, begin_pass=TritonPass.begin, state_stride=1) -> Slots:
    return Slots(spec, num_drafts, begin_pass=begin_pass, device=DEVICE, state_stride=state_stride)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    exact = found.dtype == torch.float32
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found, wanted, **tolerance)


# Two slots: prompts with drafts behind, windows that fold some or none of them, a step without.
STEPS = (
    [Part(2, 0, 3, 2), Part(0, 0, 1, 3)],
    [Part(0, 2, 1, 3, seed=1), Part(2, 5, 1)],
    [Part(0, 3, 2, 1, seed=2)],
    [Part(2, 6, 1, 3, seed=3), Part(0, 6, 1)],
)


@pytest.mark.parametrize(("spec", "stride"), zip(SPECS, (STATE_STRIDE, 1) * 2, strict=True))
def test_every_row_is_that_of_plain_rows_and_of_the_reference(spec, stride):
    cache = empty(spec, 3, state_stride=stride)
    oracle, plain = empty(spec, 3, begin_as_on_a_gpu, stride), empty(spec, 0)
    kept: dict[int, list] = {0: [], 2: []}
    for number, step in enumerate(STEPS):
        found = run(cache, step, 8 if number % 2 else None)
        for part, out, wanted in zip(step, found, run(oracle, step), strict=True):
            close(out, wanted)
            # A later step says how many of the rows before it were accepted.
            alone = [Part(part.slot, row[1], 1, seed=part.seed) for row in part.rows]
            kept[part.slot][part.first :] = zip(alone, out, strict=True)
        assert torch.equal(cache.position, oracle.position)
        assert torch.equal(cache.num_pending, oracle.num_pending)
        for slot in {part.slot for part in step}:
            if cache.position[slot]:
                close(cache.states[:, slot], oracle.states[:, slot])
            pending = slice(0, int(oracle.num_pending[slot]))
            assert torch.equal(cache.history[:, slot], oracle.history[:, slot])
            for name in ("pending_mixed", "pending_gates"):
                held, wanted = (getattr(each, name)[:, slot, pending] for each in (cache, oracle))
                assert torch.equal(held, wanted)
    assert cache.states[:, [1, SLOTS]].isnan().all()
    for alone, out in (*kept[0], *kept[2]):
        assert torch.equal(run(plain, [alone])[0][0], out)


def test_chunks_windows_and_ragged_runs_leave_the_same_bits():
    spec = spec_of(2, 8, 2, 8)
    whole = empty(spec, 2)
    (expected, beside) = run(whole, [Part(1, 0, 8), Part(0, 0, 3)])
    for lengths, num_drafts in (((1, 4, 2, 1), 2), ((1,) * 8, 0)):
        cache, first, out = empty(spec, num_drafts), 0, []
        for length in lengths:
            out += run(cache, [Part(1, first, length)], 9)
            first += length
        assert torch.equal(torch.cat(out), expected)
        assert torch.equal(cache.states[:, 1], whole.states[:, 1])
        assert torch.equal(cache.history[:, 1], whole.history[:, 1])
    assert torch.equal(run(empty(spec, 0), [Part(0, 0, 3)])[0], beside)


def test_groups_of_rows_leave_the_same_bits(monkeypatch):
    """Whatever rows a group has: folded, lasting, drafts, or none."""
    spec = spec_of(1, 8, 1, 32)
    wanted, caches = empty(spec, 3), {ahead: empty(spec, 3) for ahead in (1, 2, 3, 8)}
    for step in STEPS:
        out = run(wanted, step)
        for ahead, cache in caches.items():
            tile = triton.ScanTile(8, 1, ahead)
            with monkeypatch.context() as patch:
                patch.setattr(triton, "advance", functools.partial(triton.advance, tile=tile))
                assert torch.equal(torch.cat(run(cache, step)), torch.cat(out)), ahead
            found, expected = (each.states[:, [0, 2]] for each in (cache, wanted))
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), ahead


def test_rows_that_do_not_follow_give_nan_and_change_nothing():
    spec = SPECS[0]
    cache = empty(spec, 4)
    run(cache, [Part(0, 0, 3, 4)])
    before = [held.clone() for held in cache.cache.slots]
    out, beside = run(cache, [Part(0, 8, 1), Part(2, 0, 1)])
    assert out.isnan().all()
    assert torch.equal(beside, run(empty(spec, 0), [Part(2, 0, 1)])[0])
    for held, was in zip(cache.cache.slots, before, strict=True):
        assert torch.equal(held[:, 0].nan_to_num(7.0), was[:, 0].nan_to_num(7.0))


def test_a_step_that_is_nan_stays_nan():
    spec = SPECS[0]
    params = params_of(spec, limit=(0.05, 2.0), device=DEVICE)
    params.dt_bias.fill_(float("nan"))
    cache = empty(spec, 0)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    running = cache.begin(AttentionRows(slots, slots, slots, slots[None], RowRuns.even(1, 1)))
    rule = spec.rule
    mixed, dt = torch.ones(1, rule.conv_channels), torch.ones(1, rule.num_heads)
    assert cache.run(running, 0, params, mixed.to(DEVICE), dt.to(DEVICE)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "size"), [(1, 5), (3, 16), (2, 37)])
def test_the_norm_and_the_activation_are_the_references(groups, size, dtype):
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(5, 2 * groups * size + 1, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(groups * size, generator=generator).to(DEVICE)
    x, gate = wide[:, : groups * size].contiguous(), wide[:, groups * size : -1]
    found = norm_triton.gated_group_norm(x, gate, weight, groups, 1e-5)
    wanted = norm_rope.gated_group_norm(x.cpu(), gate.cpu(), weight.cpu(), groups, 1e-5)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-5)
    x[0, 0], x[1, 1] = float("nan"), float("-inf")
    wanted = activation.relu_squared(x.cpu())
    found = activation_triton.relu_squared(x).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_rows", "runs", "tile"),
    [
        (1, RowRuns.even(1, 1), triton._LARGE),
        (6, RowRuns.even(1, 6), triton._SMALL),
        (48, RowRuns.even(8, 6), triton._LARGE),
        (4096, RowRuns(64, 4096, None, 0, 0), triton._SMALL),
        (4096, RowRuns(64, 512, None, 0, 0), triton._LARGE),
        (1536, RowRuns(64, 1536, None, 60, 6), triton._LARGE),
    ],
)
def test_tiles_suit_the_runs_that_have_rows(num_rows, runs, tile):
    """Heads of Nemotron-3-Nano; requests are padded to 64."""
    assert triton.choose(Mamba2(64, 64, 8, 128, 4), num_rows, runs, max_runs=256) == tile


@pytest.mark.parametrize("tile", [triton._LARGE, triton._SMALL])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [3, 16, 64, 128])
def test_no_columns_that_are_loaded_at_once_are_divided_among_threads(tile, lanes, head_dim):
    """A sum of four columns would have another order in the tile that divides them."""
    fitted = tile.fitted(head_dim, lanes)
    assert fitted.num_warps == 1 or 32 * fitted.num_warps <= fitted.rows * lanes


def test_an_engine_has_no_more_runs_with_rows_than_requests():
    runs = RowRuns(64, 448, None, 0, 0)
    assert triton.choose(Mamba2(64, 64, 8, 128, 4), 448, runs, max_runs=1) == triton._SMALL


ADVANCE = """
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model import activation_triton, norm_triton
from sametoken.ops.model.mamba2 import hopper, prepare, triton
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent import runs
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.state.caches import ModelCache

for module in (activation_triton, hopper, norm_triton, prepare, runs, triton):
    module.pdl_options = lambda tensor, early=True: {"PDL": True, "launch_pdl": early}

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

def advance(tile, sizes, drafts, taps):
    rule = Mamba2(*sizes, taps)
    cache = ModelCache.allocate(
        [Recurrent(rule, torch.bfloat16)], num_blocks=0, block_size=1, max_num_seqs=2,
        num_drafts=drafts, device=torch.device("cpu"),
    )
    rows = torch.zeros(2 * (drafts + 1), dtype=torch.int64)
    starts = (torch.arange(10) * (drafts + 1)).clamp(max=len(rows))
    padded = RowRuns(9, drafts + 1, starts, 1, drafts + 1)
    at = AttentionRows(rows, rows, rows, rows[None], padded, rows == 0)
    plan, (memory,) = runs.plan_runs(at, cache.folded), cache.layers
    heads = torch.zeros(rule.num_heads)
    raw = RawRows(zeros(len(rows), rule.conv_channels), (zeros(len(rows), rule.num_heads),))
    conv, bias = zeros(taps, rule.conv_channels), zeros(rule.conv_channels)
    params = Mamba2Params(rule, heads, heads, heads, conv, bias)
    return plan, params, memory, triton.advance(plan, params, raw, memory, tile)
"""


def test_launches_that_overlap_compile_for_a_gpu(tmp_path):
    """Sizes of real heads; one head, of sizes that are no powers of two, and one tap.

    Small tiles of real heads, which load rows of four parts ahead, take the compiler 7 s: those of
    one part stand for them.
    """
    code = """
plan, params, memory, real = advance(triton._LARGE, (64, 64, 8, 128), 5, 4)
rule = params.rule
prepared = torch.zeros(99, rule.conv_channels + 2 * rule.num_heads)
hopper.walk(plan, params, prepared, memory, real)
*_, odd = advance(triton._SMALL, (1, 3, 1, 21), 1, 1)
for out, groups in ((real, 8), (odd, 1)):
    norm_triton.gated_group_norm(out, out, zeros(out.shape[1]), groups, 1e-5)
    activation_triton.relu_squared(out)
"""
    compile_launches(ADVANCE + code, tmp_path)


@pytest.mark.parametrize("sizes", [(4, 128, 2, 8), (2, 64, 1, 4)])
def test_every_tile_adds_a_state_in_one_order(tmp_path, sizes):
    code = f"for tile in (triton._LARGE, triton._SMALL):\n    advance(tile, {sizes}, 3, 4)\n"
    compile_launches(ADVANCE + code, tmp_path)
    large, small = orders_of_sums(tmp_path, "_advance_kernel")
    assert large == small
    assert ((1, 2), (), ()) in large


LONG = RowRuns(3, 300, torch.tensor([0, 1, 301, 320]), 1, 1)


@pytest.mark.parametrize(
    ("sizes", "rows", "on_hopper", "walked"),
    [
        ((8, 64, 2, 128), LONG, True, True),
        ((8, 64, 2, 128), LONG, False, False),
        ((8, 48, 2, 128), LONG, True, False),
        ((8, 64, 2, 64), LONG, True, False),
        ((8, 64, 2, 128), RowRuns.even(4, 200), True, False),
        # Prepared rows of 454 numbers, of which copies by 16 bytes would not begin at their first.
        ((3, 64, 1, 128), LONG, True, False),
    ],
)
def test_the_gluon_walk_serves_long_runs_on_hopper(sizes, rows, on_hopper, walked, monkeypatch):
    """Windows, which all rows of an even pass are, stay with the other walk."""
    monkeypatch.setattr(hopper_runs, "is_hopper", lambda device: on_hopper)
    rule = Mamba2(*sizes, 4)
    prepared = torch.empty(9, rule.conv_channels + 2 * rule.num_heads)
    assert hopper.serves(Runs(torch.empty(3, 9), rows), rule, prepared) is walked

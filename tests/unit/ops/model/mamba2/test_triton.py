"""Mamba-2's kernels: tiles, and launches (tests of both rules: recurrent/test_triton.py)."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.compiled import compile_launches, orders_of_sums
from helpers.recurrent import params_of
from helpers.recurrent_rows import DEVICE, Row, empty, run
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model import activation, activation_triton, norm_rope, norm_triton
from sametoken.ops.model.mamba2 import hopper, triton
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent import hopper as hopper_runs
from sametoken.ops.model.recurrent.runs import Runs


def rows(slot: int, first: int, num_committed: int, num_drafts: int = 0) -> list[Row]:
    places = range(first, first + num_committed + num_drafts)
    return [Row(slot, p, 100 * slot + p, p < first + num_committed) for p in places]


# Two slots: prompts with drafts behind, windows that fold some or none of them, a step without.
STEPS = (
    [rows(2, 0, 3, 2), rows(0, 0, 1, 3)],
    [rows(0, 2, 1, 3), rows(2, 5, 1)],
    [rows(0, 3, 2, 1)],
    [rows(2, 6, 1, 3), rows(0, 6, 1)],
)


def test_groups_of_rows_leave_the_same_bits(monkeypatch):
    """Whatever rows a group has: folded, lasting, drafts, or none."""
    spec = Recurrent(Mamba2(1, 8, 1, 32, 4), torch.float32)
    wanted, *others = (empty(spec, 3, state_stride=1) for _ in range(5))
    for step in STEPS:
        out = run(wanted, step)
        for ahead, cache in zip((1, 2, 3, 8), others, strict=True):
            tile = triton.ScanTile(8, 1, ahead)
            with monkeypatch.context() as patch:
                patch.setattr(triton, "advance", functools.partial(triton.advance, tile=tile))
                assert torch.equal(torch.cat(run(cache, step)), torch.cat(out)), ahead
            found, expected = (each.states[:, [0, 2]] for each in (cache, wanted))
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), ahead


def test_a_step_that_is_nan_stays_nan():
    spec = Recurrent(Mamba2(2, 3, 1, 5, 4), torch.float32)
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


@pytest.mark.parametrize(
    ("sizes", "lanes"),
    [((4, 128, 2, 8), (1,)), ((2, 64, 1, 4), ()), ((4, 64, 2, 32), (1, 2, 4))],
)
def test_every_tile_adds_a_state_in_one_order(tmp_path, sizes, lanes):
    """Of a thread's columns, then of neighbouring threads, whatever the compiler prefers."""
    code = f"for tile in (triton._LARGE, triton._SMALL):\n    advance(tile, {sizes}, 3, 4)\n"
    compile_launches(ADVANCE + code, tmp_path)
    orders = {((1, 2), (), ()), ((), lanes, ())}
    assert orders_of_sums(tmp_path, "_advance_kernel") == [orders, orders]


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

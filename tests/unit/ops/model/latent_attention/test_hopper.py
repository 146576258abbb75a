"""Latent attention on Hopper without the chip: its choices, and that it compiles."""

from __future__ import annotations

import json
import re
from itertools import accumulate

import pytest
import torch

from helpers.compiled import Launched, compile_launches, unused_barriers
from helpers.gluon_blocks import Block, Pointer
from helpers.gluon_interpreter import interpreted
from helpers.machine_code import disassembled
from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.attention.schedule import LEVELS
from sametoken.ops.model.latent_attention import (
    hopper,
    hopper_pair_tiles,
    hopper_shares,
    hopper_tiles,
)
from sametoken.ops.model.latent_attention.shape import LayerLatent

CONFIGS = [*hopper.CONFIGS.values(), hopper.JOINING]


@pytest.mark.parametrize(
    ("num_runs", "width", "heads", "queries", "whole"),
    [
        (1, 1, 16, 16, False), (8, 1, 20, 32, False), (64, 1, 20, 32, False),
        (256, 1, 20, 32, False), (8, 4, 20, 64, False), (64, 4, 20, 64, True),
        (1, 2048, 20, 64, True), (1, 300, 20, 64, False), (8, 1, 128, 64, False),
        (2000, 1, 20, 64, True), (64, 3, 20, 64, False), (256, 3, 20, 64, False),
        # Tiles of more than 32 queries are a pair's.
        (8, 2, 16, 32, False), (8, 2, 20, 64, False), (8, 3, 16, 64, False), (3, 1, 33, 64, False),
        # Programs of whole rows would leave most of the chip idle in their last round.
        (1, 512, 20, 64, False), (1, 630, 20, 64, False), (1, 640, 20, 64, True),
        (1, 840, 20, 64, True), (1, 846, 20, 64, False), (1, 1024, 20, 64, True),
    ],
)  # fmt: skip
def test_few_queries_are_spread_over_programs(num_runs, width, heads, queries, whole):
    chosen = hopper.choose(num_runs, width, num_runs * width, heads, 4096)
    assert chosen in ([hopper.WHOLE_ROWS] if whole else CONFIGS)
    assert chosen.queries == queries


@pytest.mark.parametrize(
    ("num_runs", "heads", "joins"),
    [(127, 16, False), (128, 16, True), (256, 20, False), (512, 128, False)],
)
def test_programs_join_splits_where_they_have_all_of_most_tiles(num_runs, heads, joins):
    assert hopper.choose(num_runs, 1, num_runs, heads, 4096).joins == joins


@pytest.mark.parametrize("width", [1, 4, 8])
def test_many_chunks_of_a_tile_each_are_computed_whole(width):
    """As windows they have a kernel for many tiles, which start-up compiles for windows alone."""
    asked = (512, width, 512, 8, 1024)
    assert hopper.choose(*asked).programs
    assert hopper.choose(*asked, are_chunks=True) == hopper.WHOLE_ROWS
    assert hopper.choose(256, *asked[1:], are_chunks=True).programs


def test_results_of_splits_stay_within_their_memory():
    assert hopper.choose(64, 1, 64, 20, 1 << 17).programs
    assert not hopper.choose(256, 1, 256, 20, 1 << 17).programs


def test_every_split_holds_whole_tiles():
    assert all(size % hopper_tiles.TILE.value == 0 for _, size in LEVELS)


def test_a_pair_sums_weights_over_positions_in_the_order_of_rows():
    """In which the sum over rows of products adds, so the kernels of few queries."""
    weights = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) ** 8
    with interpreted():
        of_rows = hopper_tiles.gl.sum(Block(weights.T), 0).data
        assert torch.equal(hopper_pair_tiles._total(Block(weights)).data, of_rows)
    assert not torch.equal(of_rows, weights.sum(1))


def shares_of(programs, interpreter, *arguments):
    """``own_share`` of each of some programs, as integers."""
    tensors = (Pointer(torch.as_tensor(one)) for one in arguments[:3])
    arguments = (*tensors, *arguments[3:])
    for program in range(programs):
        interpreter.stand_at((program, 0, 0), (programs, 1, 1))
        yield tuple(map(int, hopper_shares.own_share(*arguments)))


@pytest.mark.parametrize("programs", [1, 7, 128])
@pytest.mark.parametrize("first_run", [0, 2])
def test_shares_are_equal_parts_of_the_line_of_all_tiles(programs, first_run):
    sizes, heads, queries, width = [1, 3, 0, 2, 4, 1, *[0] * 5], 20, 32, 4
    starts = [0, *accumulate(sizes)]
    positions = torch.randint(2000, (starts[-1],), generator=torch.Generator().manual_seed(0))
    slots = torch.arange(starts[-1]) * 3 + 1
    tiles_per_run = -(-width * heads // queries)
    num_tiles = (len(sizes) - first_run) * tiles_per_run
    line = []  # of each KV tile: its query tile and slot
    for tile in range(num_tiles):
        begin, stop = starts[first_run + tile // tiles_per_run :][:2]
        first, stop = begin * heads + tile % tiles_per_run * queries, stop * heads
        if first < stop:
            row = (min(first + queries, stop) - 1) // heads
            tiles = (int(positions[begin]) + row - begin) // 64 + 1
            line += [(tile, int(slots[begin]))] * tiles
    sizes_of = ((first_run, width, tiles_per_run, num_tiles), heads, queries, 256)
    shares = []
    with interpreted() as interpreter:
        found = [*shares_of(programs, interpreter, positions, slots, starts, *sizes_of)]
    for tile, slot, start, low, high in found:
        shares.append((low, high))
        if low < len(line):
            assert (tile, slot) == line[low]
            assert start == [one for one, _ in line].index(tile)
        else:
            assert tile == num_tiles
    ends = [high for _, high in shares]
    assert [low for low, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == len(line)
    assert {high - low - len(line) // programs for low, high in shares} <= {0, 1}


def test_runs_of_one_length_are_cut_at_their_borders():
    where = ([16_400] * 8, [*range(8)], [*range(9)])
    with interpreted() as interpreter:
        shares = [*shares_of(128, interpreter, *where, (0, 1, 1, 8), 20, 32, 256)]
    assert [share[:3] for share in shares[::16]] == [(run, run, 257 * run) for run in range(8)]
    assert [low for *_, low, _ in shares[::16]] == [257 * run for run in range(8)]


@pytest.mark.parametrize("config", [*CONFIGS, hopper.WHOLE_ROWS])
def test_kept_rows_wait_for_memory_that_the_kernels_before_them_write(config, monkeypatch):
    """Those of a chunk's rows below the first that is kept; the join reads results alone."""
    launched, joined = Launched(), Launched()
    for kernel in ("pair_rows_kernel", "pair_splits_kernel", "splits_kernel"):
        monkeypatch.setattr(hopper, kernel, launched)
    monkeypatch.setattr(hopper, "join_kernel", joined)
    monkeypatch.setattr(
        hopper, "pdl_options", lambda q, early=True: {"PDL": True, "launch_pdl": early}
    )
    at, table = torch.arange(1), torch.zeros(1, 4, dtype=torch.int64)
    memory = LayerLatent(torch.zeros(4, 64, 576, dtype=torch.bfloat16), 512)
    q, runs = torch.zeros(1, 16, 576, dtype=torch.bfloat16), RowRuns.even(1, 1)
    for rows in (AttentionRows(at, at, at, table, runs), KeptRows(at, at, at, table, runs)):
        hopper.attention(q, 0.1, rows, memory, config=config)
    assert launched.early == [True, False]
    assert all(joined.early)


def test_it_serves_hopper_alone(monkeypatch):
    half, where = torch.bfloat16, (64, torch.device("cpu"))
    assert not hopper.serves(512, 576, half, half, *where)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert hopper.serves(512, 576, half, half, *where)
    assert hopper.serves(512, 576, half, FLOAT8, *where)
    assert not hopper.serves(512, 576, torch.float32, torch.float32, *where)
    assert not hopper.serves(512, 576, torch.float32, FLOAT8, *where)
    assert not hopper.serves(256, 320, half, half, *where)
    assert not hopper.serves(512, 576, half, half, 24, where[1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with every form as compiled, for launches of many counts.

    A form of pairs takes seconds: one has blocks of 16, the other half precision. ``tests/gpu``
    runs both with blocks of every size, and every form of float8.
    """
    folder = tmp_path_factory.mktemp("compiled")
    code = """
from sametoken.ops.model.latent_attention import hopper
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.backend import AttentionRows, RowRuns

table = torch.zeros(64, 256, dtype=torch.int64)
from sametoken.ops.model.attention.kv import FLOAT8

half, scale = torch.bfloat16, torch.ones(1)
for config, size, dtype, stored in (
    (hopper.CONFIGS[16], 64, half, half), (hopper.CONFIGS[32], 64, half, half),
    (hopper.JOINING, 64, half, half), (hopper.CONFIGS[64], 16, half, half),
    (hopper.WHOLE_ROWS, 64, torch.float16, torch.float16),
    (hopper.CONFIGS[32], 16, half, FLOAT8), (hopper.WHOLE_ROWS, 64, half, FLOAT8),
):
    vectors = torch.zeros(2, size, 576, dtype=stored)
    memory = LayerLatent(vectors, 512, scale if stored == FLOAT8 else None)
    for count, width in ((1, 1), (2, 3), (16, 16), (17, 1)):
        at = torch.zeros(count * width, dtype=torch.int64)
        q = torch.zeros(len(at), 20, 576, dtype=dtype)
        starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
        rows = AttentionRows(at, at, at, table, RowRuns(count, width, starts, count // 2, width))
        hopper.attention(q, 0.07, rows, memory, config=config)
"""
    compile_launches(code, folder)
    return folder


def test_every_form_compiles_once_for_all_counts(compiled):
    found = sorted(path.stem for path in compiled.rglob("*_kernel.ptx"))
    # Of either order of elements, of what programs left, and of float8.
    joins = ["join_kernel"] * 4
    # Of 16 and of 32 queries, of 16 that are joined, and of float8.
    few = ["splits_kernel"] * 4
    assert found == [*joins, *["pair_rows_kernel"] * 2, "pair_splits_kernel", *few]


def test_every_barrier_is_waited_for(compiled):
    assert not unused_barriers(compiled)


def test_two_programs_of_the_join_fit_beside_one_of_splits_of_16_queries(compiled):
    """In registers and in shared memory, of which 1 KB a program is the system's."""
    sizes = {"splits_kernel": [], "join_kernel": []}
    for name, found in sizes.items():
        for path in compiled.rglob(f"{name}.json"):
            of = json.loads(path.read_text())
            found.append((of["num_warps"] * 32 * of["maxnreg"], of["shared"] + 1024))
    splits, join = min(sizes["splits_kernel"]), max(sizes["join_kernel"])
    assert splits[0] + 2 * join[0] <= 1 << 16
    assert splits[1] + 2 * join[1] <= 228 << 10


def test_the_join_waits_once_for_all_that_it_loads_ahead(compiled):
    codes = disassembled(list(compiled.rglob("join_kernel.cubin")))
    assert codes
    for code in codes:
        operations = [operation for _, operation, _ in code]
        first = operations.index("MUFU.EX2")
        wide = [one for one in operations[:first] if re.match(r"LDG\.E(\.EL)?\.128", one)]
        # A thread loads eight elements of a split.
        assert len(wide) in [2 * sizes["AHEAD"] for sizes in hopper.JOIN_SIZES.values()]
        assert not any(one.startswith("LDG") for one in operations[first:])

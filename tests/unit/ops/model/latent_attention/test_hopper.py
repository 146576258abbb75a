"""Latent attention on Hopper without the chip: its choices, and that it compiles.

Its rows are compared on the chip (tests/gpu/test_latent_attention_gpu.py): Gluon has no
interpreter.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate, pairwise, product
from types import SimpleNamespace

import pytest
import torch

from helpers.compiled import Launched, compile_launches, unused_barriers
from helpers.machine_code import disassembled
from sametoken.ops.backend import AttentionRows, KeptRows, RowRuns
from sametoken.ops.model.attention import arithmetic, hopper_sums, schedule
from sametoken.ops.model.attention import hopper_kernels as attention_kernels
from sametoken.ops.model.attention import hopper_tiles as attention_tiles
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.attention.schedule import LEVELS, max_splits
from sametoken.ops.model.latent_attention import (
    hopper,
    hopper_kernels,
    hopper_pair_results,
    hopper_pair_tiles,
    hopper_results,
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


def test_padding_runs_add_a_tile_each_at_most():
    for sizes in ([1, 4, 0, 17, 99, 110], [33, 33, 33], [32, 1, 1, 1]):
        needed = sum(-(-size * 20 // 64) for size in sizes)
        most = hopper.most_tiles(len(sizes), max(sizes), sum(sizes), 20, 64)
        assert needed <= most <= needed + len(sizes)


def test_every_split_holds_whole_tiles():
    assert all(size % hopper_tiles.TILE.value == 0 for _, size in LEVELS)


class Memory:
    """A pointer into numbers."""

    def __init__(self, values, at=0):
        self.values, self.at = torch.as_tensor(values), torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=self.values.dtype)

    def __add__(self, offset):
        return Memory(self.values, self.at + offset)


class OneProgram:
    """The part of Gluon's language that the kernels below use, for one program of several."""

    constexpr = int
    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    sum, exp2, static_range = staticmethod(torch.sum), staticmethod(torch.exp2), range

    def __init__(self, *program, programs=1):
        self.program_id = lambda axis: torch.tensor(program[axis])
        self.num_programs = lambda axis: programs

    def BlockedLayout(self, *_):
        return None

    def arange(self, begin, end, layout):
        return torch.arange(begin, end)

    def zeros(self, shape, dtype, layout):
        return torch.zeros(shape, dtype=dtype)

    def where(self, condition, a, b):
        return torch.where(torch.as_tensor(condition), a, b)

    def maximum(self, a, b):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    def minimum(self, a, b):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def fma(self, a, b, c):
        return a * b + c

    def load(self, memory, mask=True, other=0, eviction_policy=""):
        mask = torch.as_tensor(mask)
        assert (mask | (memory.at >= 0)).all()
        at = memory.at.clamp(max=len(memory.values) - 1)
        return torch.where(mask, memory.values[at], other)

    def store(self, memory, values):
        memory.values[memory.at] = values

    def associative_scan(self, values, axis, combine):
        return values.cumsum(axis)

    def reduce(self, values, axis, combine):
        return tuple(one.sum(axis) for one in values)


@pytest.fixture
def join(monkeypatch):
    """``join_kernel`` as a function of its program and its arguments."""
    names = ("dim_of", "pair_dim_of", "joined", "rows_of_run", "splits_before", "_stored_splits")
    for name in (*names, "divisor_of", "scaled"):
        monkeypatch.setattr(hopper_kernels, name, getattr(hopper_kernels, name).fn)
    for name in ("RANK", "LOWEST"):
        monkeypatch.setattr(hopper_kernels, name, getattr(hopper_kernels, name).value)
    monkeypatch.setattr(hopper_results, "HALF", hopper_results.HALF.value)
    for name in ("_BEGIN_1", "_BEGIN_2", "_BEGIN_3", "_SIZE_0", "_SIZE_1", "_SIZE_2", "_SIZE_3"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).value)

    def run(program, *arguments, **constants):
        for module in (hopper_kernels, hopper_sums, attention_tiles, hopper_tiles):
            monkeypatch.setattr(module, "gl", OneProgram(*program))
        for module in (schedule, arithmetic):
            monkeypatch.setattr(module, "tl", OneProgram(*program))
        hopper_kernels.join_kernel.fn(*arguments, **constants, PDL=False)

    return run


def test_lines_hold_sums_in_the_order_that_the_join_undoes(monkeypatch):
    monkeypatch.setattr(hopper_results, "HALF", 256)
    monkeypatch.setattr(hopper_results, "_line_registers", lambda *_: None)
    language = SimpleNamespace(constexpr=int, convert_layout=lambda values, layout: values)
    monkeypatch.setattr(hopper_results, "gl", language)
    sums = torch.arange(256)[:, None] + 1000 * torch.arange(32)
    lines = hopper_results._lines_of.fn(sums)
    element = hopper_results.dim_of.fn(torch.arange(512))
    assert torch.equal(lines, element[:256] + 1000 * torch.arange(32)[:, None])
    assert torch.equal(element[256:], element[:256] + 256)


def test_chunks_of_a_pair_hold_sums_in_the_order_that_the_join_undoes(monkeypatch):
    monkeypatch.setattr(hopper_pair_results, "CHUNK", 64)
    language = SimpleNamespace(convert_layout=lambda values, layout: values)
    monkeypatch.setattr(hopper_pair_results, "gl", language)
    sums = torch.arange(512) + 1000 * torch.arange(64)[:, None]
    chunks = [hopper_pair_results._lines_of.fn(one) for one in sums.split(64, dim=1)]
    element = hopper_pair_results.dim_of.fn(torch.arange(512))
    assert torch.equal(torch.cat(chunks, dim=1), element + 1000 * torch.arange(64)[:, None])


def test_halves_are_the_lower_and_the_upper_columns(monkeypatch):
    language = SimpleNamespace(constexpr=int, split=lambda values: values.unbind(-1))
    monkeypatch.setattr(hopper_pair_results, "gl", language)
    sums = torch.arange(64 * 256).view(64, 256)
    low, high = hopper_pair_results._halves.fn(sums)
    assert torch.equal(torch.cat((low, high), dim=1), sums)


def test_a_pair_sums_weights_over_positions_in_the_order_of_rows(monkeypatch):
    language = SimpleNamespace(
        constexpr=int, static_range=range, sum=lambda values, axis: values.sum(axis),
        convert_layout=lambda values, layout: values,
    )  # fmt: skip
    monkeypatch.setattr(hopper_pair_tiles, "gl", language)
    monkeypatch.setattr(hopper_pair_tiles, "QUERIES", 64)
    weights = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) ** 8
    # Rows of a warp group's products: bit 3 is in a thread, 2 to 0 in a warp, 5 and 4 over warps.
    rows = weights.T
    for bit in (3, 2, 1, 0, 5, 4):
        kept = torch.tensor([at for at in range(64) if not at & 1 << bit])
        rows = torch.zeros_like(rows).index_add_(0, kept, rows[kept] + rows[kept + (1 << bit)])
    assert torch.equal(hopper_pair_tiles._total.fn(weights), rows[0])


#: Places of elements in a line: a thread's four lie side by side. They differ in bits 7 and 3 of
#: the element, or of a pair's in bits 3 and 0.
STORED = {
    False: torch.arange(512).view(2, 2, 8, 2, 8).permute(0, 2, 4, 1, 3).reshape(512),
    True: torch.arange(512).view(32, 2, 4, 2).permute(0, 2, 1, 3).reshape(512),
}


@pytest.mark.parametrize(("pair", "joins"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("ahead", [3, hopper.JOIN_SIZES[False]["AHEAD"]])
def test_splits_are_joined_in_order_whatever_is_loaded_ahead(join, ahead, pair, joins):
    # The first run is of an earlier launch, the second has a dead row, the third no row.
    positions, slots = torch.tensor([0, 5000, 5001, 0, 700]), torch.tensor([1, 2, 2, 9, 3])
    heads, first_run, width, most, scale, factor = 2, 1, 3, 20, 0.25, 0.3 if joins else 1.0
    starts = torch.tensor([0, 1, 4, 4, 5])
    random = torch.Generator().manual_seed(0)
    sums = torch.randn(3 * width, heads, most, 512, generator=random)
    stats = torch.rand(3 * width, heads, most, 2, generator=random) * 9
    # By tile of four queries, two tiles a run: what programs joined lies at the last one's place.
    num_joined = torch.tensor([4, 1, 99, 99, 0, 99]) if joins else None
    lines = [(1, 0), (2, 1), *([] if joins else [(4, 6)])]
    for position, place in ((5000, 0), (5001, 1), (0, 2), (700, 6)):
        for part in (sums, stats):
            part[place, :, max_splits(position + 1) :] = torch.nan
            part[place, :, : 3 * joins * (place < 2)] = torch.nan
    out = torch.full((5, heads, 512), 77.0)
    memory = (Memory(one.view(-1)) for one in (sums, stats))
    tensors = (*memory, *map(Memory, (positions, slots, starts)))
    vector_scale = Memory(torch.tensor([factor])) if joins else None
    tensors += (vector_scale, Memory(num_joined) if joins else None, Memory(out.view(-1)))
    for place, head in product(range(3 * width), range(heads)):
        sizes = {"HEADS": heads, "AHEAD": ahead, "PAIR": pair}
        join((place, head), *tensors, first_run, width, 2, 4, most, scale, **sizes)
    assert (out[0] == 77).all()
    assert (out[3] == 0).all() or joins
    assert (out[4] == 77).all() or not joins
    for row, place in lines:
        for head in range(heads):
            top, total, acc = torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(512)
            for split in range(3 * joins, max_splits(int(positions[row]) + 1)):
                weight, peak = stats[place, head, split]
                highest = torch.maximum(top, peak)
                old = torch.exp2((top - highest) * (scale * torch.tensor(factor)))
                new = torch.exp2((peak - highest) * (scale * torch.tensor(factor)))
                acc = acc * old + sums[place, head, split] * new
                total, top = total * old + weight * new, highest
            assert torch.equal(out[row, head, STORED[pair]], acc / (total / factor))


@pytest.mark.parametrize("first_run", [0, 2])
def test_programs_of_whole_rows_cover_every_query_of_ragged_runs_once(first_run, monkeypatch):
    sizes, heads, queries = [1, 4, 0, 17, 99, 110, *[0] * 10], 20, 64
    starts = [0, *accumulate(sizes)]
    sizes = sizes[first_run:]
    found = []
    for program in range(hopper.most_tiles(len(sizes), max(sizes), sum(sizes), heads, queries)):
        monkeypatch.setattr(attention_kernels, "gl", OneProgram(program))
        own_tile = attention_kernels.own_tile.fn
        begin, stop, first = own_tile(
            Memory(starts), first_run, len(sizes), 110, heads, queries, 128
        )
        if begin < stop:
            assert (int(begin), int(stop)) in pairwise(starts)
            last = min(first + queries, (stop - begin) * heads)
            found += range(begin * heads + first, begin * heads + last)
    assert sorted(found) == [*range(starts[first_run] * heads, starts[-1] * heads)]


@pytest.fixture
def own_shares(monkeypatch):
    """``hopper_shares.own_share`` of each of some programs, by its arguments, as integers."""
    monkeypatch.setattr(hopper_shares, "TILE", 64)
    own_share = hopper_shares.own_share.fn
    for name in ("tile_of", "end_tile", "rows_of_run"):
        monkeypatch.setattr(hopper_shares, name, getattr(hopper_shares, name).fn)

    def run(programs, *arguments):
        for program in range(programs):
            for module in (hopper_shares, attention_tiles):
                monkeypatch.setattr(module, "gl", OneProgram(program, programs=programs))
            yield tuple(map(int, own_share(*arguments)))

    return run


@pytest.mark.parametrize("programs", [1, 7, 128])
@pytest.mark.parametrize("first_run", [0, 2])
def test_shares_are_equal_parts_of_the_line_of_all_tiles(programs, first_run, own_shares):
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
    memory = (Memory(positions), Memory(slots), Memory(starts))
    sizes_of = (first_run, width, tiles_per_run, num_tiles, heads, queries, 256, 4)
    shares = []
    for tile, slot, start, low, high in own_shares(programs, *memory, *sizes_of):
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


@pytest.mark.parametrize("programs", [7, 128])
@pytest.mark.parametrize(("heads", "width"), [(4, 1), (20, 1), (20, 4)])
def test_programs_compute_every_split_of_every_query_tile_once(
    heads, width, programs, own_shares, monkeypatch
):
    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda is_so, a, b: a if is_so else b)
    monkeypatch.setattr(schedule, "tl", numbers)
    splits_before = schedule.splits_before.fn
    monkeypatch.setattr(schedule, "splits_before", lambda *given: splits_before(*given).value)
    monkeypatch.setattr(hopper_shares, "own_part", schedule.own_part.fn)
    queries, tiles_per_run = 32, -(-width * heads // 32)
    # Long, equal and padded runs: the last two stand at position 0.
    begins = [20_000, 16_384, 16_400, 16_400, 1_023, 300, 0, 0]
    positions = Memory([begin + row for begin in begins for row in range(width)])
    memory = (positions, Memory(range(width * len(begins))), None)
    found = []
    sizes = (0, width, tiles_per_run, tiles_per_run * len(begins), heads, queries, 256, 4)
    for tile, _, start, low, high in own_shares(programs, *memory, *sizes):
        at = start
        for one in range(tile, tiles_per_run * len(begins)):
            first = one % tiles_per_run * queries
            rows = (width * (one // tiles_per_run), first, width * heads)
            _, end, split, last, after = hopper_shares.own_splits.fn(
                positions, *rows, at, low, high, heads, queries
            )
            if at < high:
                found += [(one, own) for own in range(int(split), int(last))]
                assert split >= last or last <= after
            at += int(end)
    expected = []
    for tile in range(tiles_per_run * len(begins)):
        last_query = min(tile % tiles_per_run * queries + queries, width * heads) - 1
        position = begins[tile // tiles_per_run] + last_query // heads
        expected += [(tile, split) for split in range(max_splits(position // 64 * 64 + 64))]
    assert found == expected


def test_runs_of_one_length_are_cut_at_their_borders(own_shares):
    memory = (Memory([16_400] * 8), Memory([*range(8)]), Memory([*range(9)]))
    shares = [*own_shares(128, *memory, 0, 1, 1, 8, 20, 32, 256, 4)]
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

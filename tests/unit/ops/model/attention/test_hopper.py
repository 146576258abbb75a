"""Attention on Hopper without the chip: its schedule, its choices, and that it compiles.

Its rows are compared on the chip (tests/gpu/test_hopper_attention_gpu.py): Gluon has no
interpreter.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise, takewhile
from types import SimpleNamespace

import pytest
import torch

from helpers.compiled import Launched, compile_launches, unused_barriers
from sametoken.ops.backend import AttentionRows, AttentionShape, KeptRows, LayerKV, RowRuns
from sametoken.ops.dispatch import attention_kernels
from sametoken.ops.model.attention import (
    hopper,
    hopper_kernels,
    hopper_sums,
    hopper_tiles,
    schedule,
)
from sametoken.ops.model.attention.tuning import LOG2_E

QWEN3 = AttentionShape(32, 8, 128)


def value(function, *arguments):
    """Of a function that Gluon compiles, for numbers."""
    return function.fn(*arguments).value


def test_splits_follow_one_another_and_depend_on_position_alone(monkeypatch):
    monkeypatch.setattr(schedule.tl, "minimum", min)
    monkeypatch.setattr(schedule.tl, "maximum", max)
    levels = pairwise([*schedule.LEVELS, (60_000, 0)])
    begins = [at for (begin, size), (end, _) in levels for at in range(begin, end, size)]
    for split, (begin, end) in enumerate(pairwise(begins)):
        assert value(schedule.begin_of, split) == begin
        for position in (begin, (begin + end) // 2, end - 1):
            assert value(schedule.split_of, position) == split
            assert value(schedule.splits_before, position + 1) == split + 1
            assert schedule.max_splits(position + 1) == split + 1
    assert value(schedule.splits_before, 0) == schedule.max_splits(0) == 0


@pytest.fixture
def own_part(monkeypatch):
    """``schedule.own_part`` for numbers."""
    language = SimpleNamespace(
        minimum=min, maximum=max, where=lambda is_so, a, b: a if is_so else b
    )
    monkeypatch.setattr(schedule, "splits_before", partial(value, schedule.splits_before))
    monkeypatch.setattr(schedule, "tl", language)
    return schedule.own_part.fn


@pytest.mark.parametrize(("first", "end"), [(0, 129), (0, 7), (7, 70), (3, 700), (0, 1)])
@pytest.mark.parametrize("programs", [1, 2, 5, 128])
def test_parts_of_a_line_hold_every_split_once_and_their_share_to_half_a_split(
    first, end, programs, own_part
):
    before = schedule.begin_of.fn(first).value // 128
    tiles = end - before
    borders = [schedule.begin_of.fn(split).value // 128 for split in range(1000)]
    cuts = [before - (-place * tiles // programs) for place in range(programs + 1)]
    found = []
    # A program whose part is empty at the line's end begins after the query tile.
    for low, high in takewhile(lambda part: part[0] < end, pairwise(cuts)):
        split, last, after = own_part(low, high, first, end, 128)
        assert after == schedule.max_splits(end * 128)
        found += range(split, last)
        if split < last:
            excess = min(borders[last], end) - borders[split] - (high - low)
            assert 2 * excess <= sum(borders[s + 1] - borders[s] for s in (split, last - 1))
    assert found == [*range(first, after)]


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("window", [1, 100, 128, 1024, 4096])
def test_parts_of_windows_hold_every_split_once_from_where_the_window_begins(
    window, tile, own_part, monkeypatch
):
    for name in ("begin_of", "split_of"):
        monkeypatch.setattr(hopper_tiles, name, partial(value, getattr(schedule, name)))
    language = SimpleNamespace(minimum=min, maximum=max, where=schedule.tl.where)
    monkeypatch.setattr(hopper_tiles, "gl", language)
    monkeypatch.setattr(hopper_tiles, "own_part", own_part)
    for position, rows in (
        (0, 1),
        (100, 8),
        (1300, 4),
        (4095, 1),
        (8191, 1),
        (8200, 4),
        (40_000, 8),
    ):
        first, end, begin = hopper_tiles.extent.fn(position, rows, tile, window)
        seen = max(position - window + 1, 0)
        assert begin * tile <= seen < (begin + 1) * tile
        for programs in (1, 2, 5, 128):
            cuts = [begin - (-place * (end - begin) // programs) for place in range(programs + 1)]
            splits, tiles = [], []
            for low, high in pairwise(cuts):
                if low >= end:
                    break
                split, last, after, kv, stop = hopper_tiles.own_tiles.fn(
                    low, high, first, begin, end, tile, window
                )
                assert after == schedule.max_splits(end * tile)
                if split < last:
                    splits += range(split, last)
                    tiles += range(kv, stop)
            assert splits == [*range(first, after)]
            assert tiles == [*range(begin, end)]


@pytest.mark.parametrize(
    "config",
    sorted({c for t in hopper.TABLES.values() for c in (t.splits, t.narrow, t.wide)}, key=repr),
)
def test_every_split_holds_whole_tiles(config):
    assert all(size % config.tile == 0 for _, size in schedule.LEVELS)


def test_launches_of_one_head_size_share_their_tile():
    for table in hopper.TABLES.values():
        assert table.splits.tile == table.narrow.tile == table.wide.tile


@pytest.mark.parametrize(
    ("num_runs", "width", "chosen"),
    [
        (1, 1, "splits"), (64, 1, "splits"), (256, 4, "splits"), (8, 16, "splits"),
        (64, 16, "narrow"), (1, 300, "narrow"), (1, 100, "splits"), (1, 512, "wide"),
        (7, 300, "wide"), (2000, 1, "wide"),
    ],
)  # fmt: skip
def test_few_queries_are_spread_over_programs(num_runs, width, chosen):
    table = hopper.table_for(QWEN3)
    rows = num_runs * width
    assert hopper.choose(num_runs, width, rows, QWEN3, 4096) == getattr(table, chosen)


def test_results_of_splits_stay_within_their_memory():
    assert hopper.choose(256, 4, 1024, QWEN3, 4096) == hopper.table_for(QWEN3).splits
    assert hopper.choose(256, 4, 1024, QWEN3, 1 << 20) == hopper.table_for(QWEN3).wide


def test_padding_runs_add_a_tile_each_at_most():
    assert hopper.most_tiles(1, 4096, 4096, 32) == 128
    assert hopper.most_tiles(8, 4096, 4096, 32) == 135
    assert hopper.most_tiles(256, 1, 4096, 16) == 256
    for sizes in ([1, 4, 0, 17, 99, 110], [33, 33, 33], [32, 1, 1, 1]):
        needed = sum(-(-size // 32) for size in sizes)
        assert needed <= hopper.most_tiles(len(sizes), max(sizes), sum(sizes), 32) <= needed + 6
    # Eighty rows of one request fill no chip, whatever padding is beside them.
    assert hopper.choose(8, 80, 80, QWEN3, 4096) == hopper.table_for(QWEN3).splits


class Memory:
    """A pointer into integers, for ``own_tile``."""

    def __init__(self, values, at=0):
        self.values, self.at = torch.as_tensor(values), at

    def __add__(self, offset):
        return Memory(self.values, self.at + offset)


class OneProgram:
    """The part of Gluon's language that ``own_tile`` uses, for one program."""

    constexpr = int
    int32 = torch.int32
    where, sum = staticmethod(torch.where), staticmethod(torch.sum)
    minimum, maximum = staticmethod(min), staticmethod(max)

    def __init__(self, program):
        self.program_id = lambda axis: program

    def BlockedLayout(self, *_):
        return None

    def arange(self, begin, end, layout):
        return torch.arange(begin, end)

    def load(self, memory, mask, other):
        at = memory.at.clamp(max=len(memory.values) - 1)
        return torch.where(mask, memory.values[at], other)

    def associative_scan(self, values, axis, combine):
        assert combine is hopper_kernels.added
        return values.cumsum(axis)


@pytest.mark.parametrize("first_run", [0, 2])
def test_programs_of_whole_rows_cover_every_row_of_ragged_runs_once(first_run, monkeypatch):
    sizes, rows = [1, 4, 0, 17, 99, 110, *[0] * 10], 32
    starts = [0, *accumulate(sizes)]
    sizes = sizes[first_run:]
    found = []
    for program in range(hopper.most_tiles(len(sizes), max(sizes), sum(sizes), rows)):
        monkeypatch.setattr(hopper_kernels, "gl", OneProgram(program))
        own_tile = hopper_kernels.own_tile.fn
        begin, stop, first = own_tile(Memory(starts), first_run, len(sizes), 110, 1, rows, 128)
        if begin < stop:
            assert (int(begin), int(stop)) in pairwise(starts)
            assert first % rows == 0
            found += range(begin + first, min(begin + first + rows, stop))
    assert sorted(found) == [*range(starts[first_run], starts[-1])]


@pytest.mark.parametrize("config", [hopper.TABLES[128].splits, hopper.TABLES[128].wide])
def test_kept_rows_wait_for_memory_that_the_kernels_before_them_write(config, monkeypatch):
    """Those of a chunk's rows below the first that is kept."""
    launched = Launched()
    for kernel in ("rows_kernel", "splits_kernel"):
        monkeypatch.setattr(hopper, kernel, launched)
    monkeypatch.setattr(
        hopper, "pdl_options", lambda q, early=True: {"PDL": True, "launch_pdl": early}
    )
    at, table = torch.arange(1), torch.zeros(1, 4, dtype=torch.int64)
    kv = LayerKV(*torch.zeros(2, 4, 8, 64, 128, dtype=torch.bfloat16))
    q, arrived = torch.zeros(1, 32, 128, dtype=torch.bfloat16), hopper.counters(at.device)
    runs = RowRuns.even(1, 1)
    for rows in (AttentionRows(at, at, at, table, runs), KeptRows(at, at, at, table, runs)):
        hopper.attention(q, QWEN3, rows, kv, arrived, config=config)
    assert launched.early == [True, False]


def test_it_serves_hopper_alone(monkeypatch):
    asked = (torch.bfloat16, 64, torch.device("cpu"))
    assert not hopper.serves(QWEN3, *asked)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert hopper.serves(QWEN3, *asked)
    assert not hopper.serves(QWEN3, torch.float32, *asked[1:])
    assert not hopper.serves(QWEN3, torch.float8_e4m3fn, *asked[1:])
    assert not hopper.serves(AttentionShape(65, 1, 128), *asked)
    assert not hopper.serves(AttentionShape(4, 4, 20), *asked)
    assert not hopper.serves(AttentionShape(32, 4, 512), *asked)
    assert not hopper.serves(QWEN3, torch.bfloat16, 24, torch.device("cpu"))


def test_what_computes_attention_has_a_name(monkeypatch):
    asked = (QWEN3, torch.bfloat16, 64)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert attention_kernels("native", *asked, cpu) == "native"
    for hopper_gpu, name in ((True, "gluon"), (False, "triton")):
        monkeypatch.setattr(hopper, "is_hopper", lambda device, found=hopper_gpu: found)
        assert attention_kernels("triton", *asked, cuda) == name


@pytest.mark.parametrize("level", [0.0, 300.0, -300.0])
def test_a_sink_joins_splits_as_one_more_without_values(level, monkeypatch):
    """Queries x splits of five positions each; a sink far above or below all scores too."""
    language = SimpleNamespace(
        exp2=torch.exp2,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        fma=lambda a, b, c: a * b + c,
    )
    joined = hopper_sums.joined.fn
    for name, stand_in in (("gl", language), ("joined", joined), ("_LOG2_E", LOG2_E)):
        monkeypatch.setattr(hopper_sums, name, stand_in)
    random, factor = torch.Generator().manual_seed(0), 0.125
    scores = 30 * torch.randn(8, 3, 5, generator=random)
    values = torch.randn(3, 5, 4, generator=random)
    sinks = level + torch.linspace(-3, 3, 8)
    scale = factor * LOG2_E
    acc, top, total = torch.zeros(8, 4), torch.full((8,), -1e30), torch.zeros(8)
    for split in range(3):
        highest = scores[:, split].amax(1)
        weights = torch.exp2((scores[:, split] - highest[:, None]) * scale)
        top, total, old, new = joined(top, total, highest, weights.sum(1), scale)
        acc = acc * old[:, None] + weights @ values[split] * new[:, None]
    acc, total = hopper_sums.with_sinks.fn(acc, top, total, sinks, scale)
    beside = torch.cat((scores.flatten(1) * factor, sinks[:, None]), dim=1).double()
    expected = torch.softmax(beside, dim=1)[:, :-1] @ values.flatten(0, 1).double()
    assert (acc / total[:, None]).isfinite().all()
    torch.testing.assert_close((acc / total[:, None]).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "window", "forms", "sinks"),
    [
        ((6, 2), 100, ("splits", "wide"), None),
        # gpt-oss.
        ((64, 8), 128, ("splits", "narrow"), "torch.zeros(64)"),
        ((64, 8), None, ("splits", "wide"), "torch.zeros(64)"),
    ],
)
def test_both_forms_compile_once_for_all_counts(heads, window, forms, sinks, tmp_path):
    code = f"""
from sametoken.ops.model.attention import hopper
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns

shape = AttentionShape(*{heads}, 64, sliding_window={window})
table = torch.zeros(64, 32, dtype=torch.int64)
kv = LayerKV(*torch.zeros(2, 2, shape.num_kv_heads, 64, 64, dtype=torch.bfloat16))
forms = hopper.table_for(shape)
for count, width in ((1, 1), (2, 3), (16, 16), (17, 1)):
    at = torch.zeros(count * width, dtype=torch.int64)
    q = torch.zeros(len(at), shape.num_heads, 64, dtype=torch.bfloat16)
    starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
    rows = AttentionRows(at, at, at, table, RowRuns(count, width, starts, count // 2, width))
    for form in {forms}:
        config, arrived = getattr(forms, form), hopper.counters(q.device)
        hopper.attention(q, shape, rows, kv, arrived, {sinks}, config=config)
"""
    compile_launches(code, tmp_path)
    assert len(list(tmp_path.rglob("*_kernel.ptx"))) == 2
    assert not unused_barriers(tmp_path)

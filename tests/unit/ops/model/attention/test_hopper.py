"""Attention on Hopper without the chip: its schedule, its choices, and that it compiles."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

from helpers.compiled import Launched, compile_launches, orders_of_sums, unused_barriers
from helpers.gluon_interpreter import interpreted
from sametoken.ops.backend import AttentionRows, AttentionShape, KeptRows, LayerKV, RowRuns
from sametoken.ops.dispatch import attention_kernels
from sametoken.ops.model.attention import hopper, hopper_tiles, schedule

QWEN3 = AttentionShape(32, 8, 128)


def _forms(table: hopper.HopperTable) -> list[hopper.HopperConfig]:
    values = [getattr(table, field.name) for field in fields(table)]
    return [value for value in values if isinstance(value, hopper.HopperConfig)]


@pytest.fixture
def language():
    """Functions of kernels can be called."""
    with interpreted():
        yield


@pytest.mark.usefixtures("language")
def test_splits_follow_one_another_and_depend_on_position_alone():
    levels = pairwise([*schedule.LEVELS, (60_000, 0)])
    begins = [at for (begin, size), (end, _) in levels for at in range(begin, end, size)]
    for split, (begin, end) in enumerate(pairwise(begins)):
        assert schedule.begin_of(split) == begin
        for position in (begin, (begin + end) // 2, end - 1):
            assert schedule.split_of(position) == split
            assert schedule.splits_before(position + 1) == split + 1
            assert schedule.max_splits(position + 1) == split + 1
    assert schedule.splits_before(0) == schedule.max_splits(0) == 0


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize(("first", "end"), [(0, 129), (0, 7), (7, 70), (3, 700), (0, 1)])
@pytest.mark.parametrize("programs", [1, 2, 5, 128])
def test_parts_of_a_line_hold_every_split_once_and_their_share_to_half_a_split(
    first, end, programs
):
    borders = [int(schedule.begin_of(split)) // 128 for split in range(200)]
    before, found = borders[first], []
    cuts = [before - (-place * (end - before) // programs) for place in range(programs + 1)]
    # A program whose part is empty at the line's end begins after the query tile.
    for low, high in (part for part in pairwise(cuts) if part[0] < end):
        split, last, after = map(int, schedule.own_part(low, high, first, end, 128))
        assert after == schedule.max_splits(end * 128)
        found += range(split, last)
        if split < last:
            excess = min(borders[last], end) - borders[split] - (high - low)
            assert 2 * excess <= sum(borders[s + 1] - borders[s] for s in (split, last - 1))
    assert found == [*range(first, after)]


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("window", [1, 100, 128, 1024, 4096])
def test_parts_of_windows_hold_every_split_once_from_where_the_window_begins(window, tile):
    for position, rows in ((0, 1), (100, 8), (1300, 4), (4095, 1), (8191, 1), (40_000, 8)):
        first, end, begin = map(int, hopper_tiles.extent(position, rows, tile, window))
        assert begin == max(position - window + 1, 0) // tile
        for programs in (1, 2, 5, 128):
            cuts = [begin - (-place * (end - begin) // programs) for place in range(programs + 1)]
            splits, tiles = [], []
            for low, high in (part for part in pairwise(cuts) if part[0] < end):
                own = hopper_tiles.own_tiles(low, high, first, begin, end, tile, window)
                split, last, after, kv, stop = map(int, own)
                assert after == schedule.max_splits(end * tile)
                splits += range(split, last)
                tiles += range(kv, stop) if split < last else ()
            assert splits == [*range(first, after)]
            assert tiles == [*range(begin, end)]


@pytest.mark.parametrize(
    "config",
    sorted({config for table in hopper.TABLES.values() for config in _forms(table)}, key=repr),
)
def test_every_split_holds_whole_tiles(config):
    assert all(size % config.tile == 0 for _, size in schedule.LEVELS)


def test_launches_of_one_head_size_share_their_tile():
    for table in hopper.TABLES.values():
        assert len({config.tile for config in _forms(table)}) == 1


@pytest.mark.parametrize(
    ("num_runs", "width", "chosen"),
    [
        (8, 5, "few"), (16, 8, "few"), (17, 8, "splits"), (256, 5, "splits"),
        (8, 16, "few"), (64, 16, "narrow"), (1, 300, "narrow"), (1, 100, "few"), (1, 512, "wide"),
        (7, 300, "wide"), (2000, 1, "wide"),
    ],
)  # fmt: skip
def test_few_queries_are_spread_over_programs(num_runs, width, chosen):
    table = hopper.table_for(QWEN3)
    rows = num_runs * width
    assert hopper.choose(num_runs, width, rows, QWEN3, 4096) == getattr(table, chosen)


@pytest.mark.parametrize(
    ("num_runs", "width", "chosen"),
    [(7, 300, "narrow"), (256, 512, "narrow"), (1, 2048, "narrow"), (1, 4096, "wide")],
)
def test_short_prompts_of_small_heads_run_in_small_programs(num_runs, width, chosen):
    """In a padded step too, whose runs cannot all be of that width."""
    shape = AttentionShape(64, 8, 64)
    config = hopper.choose(num_runs, width, 4096, shape, 4096)
    assert config == getattr(hopper.table_for(shape), chosen)


@pytest.mark.parametrize(
    ("heads", "num_runs", "width", "chosen", "columns"),
    [
        ((32, 8), 1, 1, "few_columns", 8), ((32, 8), 4, 2, "few_columns", 8),
        ((32, 8), 4, 4, "few_columns", 16), ((32, 8), 5, 1, "columns", 8),
        ((32, 8), 256, 3, "columns", 16), ((28, 4), 8, 2, "few_columns", 16),
        ((16, 1), 1, 1, "few_columns", 16), ((12, 4), 9, 5, "columns", 16),
        ((32, 8), 1, 5, "few", 0), ((17, 1), 1, 1, "few", 0),
    ],
)  # fmt: skip
def test_sixteen_queries_of_a_run_or_fewer_are_columns(heads, num_runs, width, chosen, columns):
    shape = AttentionShape(*heads, 128)
    config = replace(getattr(hopper.table_for(shape), chosen), columns=columns)
    assert hopper.choose(num_runs, width, num_runs * width, shape, 4096) == config


@pytest.mark.parametrize(
    ("num_runs", "width", "chosen", "columns"),
    [
        (5, 1, "few_columns", 8), (256, 1, "few_columns", 8), (257, 1, "columns", 8),
        (64, 4, "few_columns", 16), (256, 5, "few", 0), (1, 2048, "wide", 0),
    ],
)  # fmt: skip
def test_programs_that_widen_float8_share_multiprocessors_later(num_runs, width, chosen, columns):
    config = replace(getattr(hopper.table_for(QWEN3), chosen), columns=columns)
    rows = num_runs * width
    assert hopper.choose(num_runs, width, rows, QWEN3, 4096, widens=True) == config


def test_results_of_splits_stay_within_their_memory():
    assert hopper.choose(256, 5, 1280, QWEN3, 4096) == hopper.table_for(QWEN3).splits
    assert hopper.choose(256, 5, 1280, QWEN3, 1 << 20) == hopper.table_for(QWEN3).wide


def test_rows_of_one_request_fill_no_chip_whatever_padding_is_beside_them():
    assert hopper.choose(8, 80, 80, QWEN3, 4096) == hopper.table_for(QWEN3).few


@pytest.mark.parametrize("config", [hopper.TABLES[128].few, hopper.TABLES[128].wide])
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
    half, whole, float8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    asked = (half, half, 64, torch.device("cpu"))
    assert not hopper.serves(QWEN3, *asked)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert hopper.serves(QWEN3, *asked)
    assert hopper.serves(QWEN3, half, float8, *asked[2:])
    for dtype, stored in ((whole, whole), (whole, float8), (half, torch.float16)):
        assert not hopper.serves(QWEN3, dtype, stored, *asked[2:])
    assert hopper.serves(AttentionShape(4, 4, 24), *asked)
    assert not hopper.serves(AttentionShape(4, 4, 24), half, float8, *asked[2:])
    assert not hopper.serves(AttentionShape(65, 1, 128), *asked)
    assert not hopper.serves(AttentionShape(4, 4, 20), *asked)
    assert not hopper.serves(AttentionShape(32, 4, 512), *asked)
    assert not hopper.serves(QWEN3, half, half, 24, torch.device("cpu"))


def test_what_computes_attention_has_a_name(monkeypatch):
    asked = (QWEN3, torch.bfloat16, torch.bfloat16, 64)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert attention_kernels("native", *asked, cpu) == "native"
    for hopper_gpu, name in ((True, "gluon"), (False, "triton")):
        monkeypatch.setattr(hopper, "is_hopper", lambda device, found=hopper_gpu: found)
        assert attention_kernels("triton", *asked, cuda) == name


@pytest.mark.parametrize(
    ("heads", "window", "forms", "sinks"),
    [
        ((6, 2), 100, ("columns", "few", "splits", "wide"), None),
        # gpt-oss.
        ((64, 8), 128, ("splits", "narrow"), "torch.zeros(64)"),
        ((64, 8), None, ("few_columns", "splits", "wide"), "torch.zeros(64)"),
    ],
)
def test_forms_compile_once_for_all_counts(heads, window, forms, sinks, tmp_path):
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
    assert len(list(tmp_path.rglob("*_kernel.ptx"))) == len(forms)
    assert not unused_barriers(tmp_path)
    # Queries as columns, too: a query's weights are added in the order of rows.
    names = ("rows_kernel", "splits_kernel")
    first, *others = (order for name in names for order in orders_of_sums(tmp_path, name))
    assert others == [first] * len(others)


def test_weights_of_columns_are_added_in_the_order_of_rows_in_smaller_tiles(tmp_path):
    code = """
from dataclasses import replace
from sametoken.ops.model.attention import hopper
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns

shape, at = AttentionShape(8, 2, 256), torch.zeros(1, dtype=torch.int64)
kv = LayerKV(*torch.zeros(2, 2, 2, 64, 256, dtype=torch.bfloat16))
q, table = torch.zeros(1, 8, 256, dtype=torch.bfloat16), hopper.table_for(shape)
rows = AttentionRows(at, at, at, torch.zeros(2, 8, dtype=torch.int64), RowRuns.even(1, 1))
for config in (table.narrow, table.columns, replace(table.few_columns, columns=8)):
    hopper.attention(q, shape, rows, kv, hopper.counters(q.device), config=config)
"""
    compile_launches(code, tmp_path)
    (as_rows,) = orders_of_sums(tmp_path, "rows_kernel")
    assert orders_of_sums(tmp_path, "splits_kernel") == [as_rows, as_rows]

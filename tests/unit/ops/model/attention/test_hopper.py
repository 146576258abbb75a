"""Attention on Hopper without the chip: its schedule, its choices, and that it compiles.

Its rows are compared on the chip (tests/gpu/test_hopper_attention_gpu.py): Gluon has no
interpreter.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.backend import AttentionShape
from sametoken.ops.model.attention import hopper, schedule

QWEN3 = AttentionShape(32, 8, 128)


def value(function, argument):
    """Of a function that Gluon compiles, for a number."""
    return function.fn(argument).value


def test_splits_follow_one_another_and_depend_on_position_alone():
    levels = pairwise([*schedule.LEVELS, (60_000, 0)])
    begins = [at for (begin, size), (end, _) in levels for at in range(begin, end, size)]
    for split, (begin, end) in enumerate(pairwise(begins)):
        assert value(schedule.begin_of, split) == begin
        for position in (begin, (begin + end) // 2, end - 1):
            assert value(schedule.split_of, position) == split
            assert value(schedule.splits_before, position + 1) == split + 1
            assert schedule.max_splits(position + 1) == split + 1
    assert value(schedule.splits_before, 0) == schedule.max_splits(0) == 0


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
    assert hopper.choose(num_runs, width, QWEN3, 4096) == getattr(table, chosen)


def test_results_of_splits_stay_within_their_memory():
    assert hopper.choose(256, 4, QWEN3, 4096) == hopper.table_for(QWEN3).splits
    assert hopper.choose(256, 4, QWEN3, 1 << 20) == hopper.table_for(QWEN3).wide


def test_it_serves_hopper_alone(monkeypatch):
    asked = (torch.bfloat16, 64, torch.device("cpu"))
    assert not hopper.serves(QWEN3, *asked)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    assert hopper.serves(QWEN3, *asked)
    assert not hopper.serves(QWEN3, torch.float32, *asked[1:])
    assert not hopper.serves(AttentionShape(65, 1, 128), *asked)
    assert not hopper.serves(AttentionShape(4, 4, 20), *asked)
    assert not hopper.serves(QWEN3, torch.bfloat16, 24, torch.device("cpu"))


def test_both_forms_compile_once_for_all_counts(tmp_path):
    code = """
from sametoken.ops.model.attention import hopper
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns

shape, table = AttentionShape(6, 2, 64, sliding_window=100), torch.zeros(64, 32, dtype=torch.int64)
kv = LayerKV(*torch.zeros(2, 2, 2, 64, 64, dtype=torch.bfloat16))
forms = hopper.table_for(shape)
for count, width in ((1, 1), (2, 3), (16, 16), (17, 1)):
    at = torch.zeros(count * width, dtype=torch.int64)
    q = torch.zeros(len(at), 6, 64, dtype=torch.bfloat16)
    starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
    rows = AttentionRows(at, at, at, table, RowRuns(count, width, starts, count // 2, width))
    for config in (forms.splits, forms.wide):
        hopper.attention(q, shape, rows, kv, hopper.counters(q.device), config=config)
"""
    compile_launches(code, tmp_path)
    assert len(list(tmp_path.rglob("*_kernel.ptx"))) == 2

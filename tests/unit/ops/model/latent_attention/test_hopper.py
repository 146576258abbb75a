"""Latent attention on Hopper without the chip: its choices, and that it compiles.

Its rows are compared on the chip (tests/gpu/test_latent_attention_gpu.py): Gluon has no
interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.model.attention.schedule import LEVELS
from sametoken.ops.model.latent_attention import hopper, hopper_kernels, hopper_tiles


@pytest.mark.parametrize(
    ("num_runs", "width", "heads", "queries", "whole"),
    [
        (1, 1, 16, 16, False), (8, 1, 20, 32, False), (64, 1, 20, 32, False),
        (256, 1, 20, 32, False), (8, 4, 20, 64, False), (64, 4, 20, 64, True),
        (1, 2048, 20, 64, True), (1, 300, 20, 64, False), (8, 1, 128, 64, False),
        (2000, 1, 20, 32, True),
    ],
)  # fmt: skip
def test_few_queries_are_spread_over_programs(num_runs, width, heads, queries, whole):
    chosen = hopper.choose(num_runs, width, num_runs * width, heads, 4096)
    config = hopper.CONFIGS[queries]
    assert chosen == (replace(config, programs=0) if whole else config)


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
    """A pointer into integers, for ``_own_tile``."""

    def __init__(self, values, at=0):
        self.values, self.at = torch.as_tensor(values), at

    def __add__(self, offset):
        return Memory(self.values, self.at + offset)


class OneProgram:
    """The part of Gluon's language that ``_own_tile`` uses, for one program."""

    constexpr = int
    int32 = torch.int32
    where, sum = staticmethod(torch.where), staticmethod(torch.sum)
    maximum = staticmethod(max)

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
        return values.cumsum(axis)


@pytest.mark.parametrize("first_run", [0, 2])
def test_programs_of_whole_rows_cover_every_query_of_ragged_runs_once(first_run, monkeypatch):
    sizes, heads, queries = [1, 4, 0, 17, 99, 110, *[0] * 10], 20, 64
    starts = [0, *accumulate(sizes)]
    sizes = sizes[first_run:]
    found = []
    for program in range(hopper.most_tiles(len(sizes), max(sizes), sum(sizes), heads, queries)):
        monkeypatch.setattr(hopper_kernels, "gl", OneProgram(program))
        own_tile = hopper_kernels._own_tile.fn
        begin, stop, first = own_tile(
            Memory(starts), first_run, len(sizes), 110, heads, queries, 128, 8
        )
        if begin < stop:
            assert (int(begin), int(stop)) in pairwise(starts)
            last = min(first + queries, (stop - begin) * heads)
            found += range(begin * heads + first, begin * heads + last)
    assert sorted(found) == [*range(starts[first_run] * heads, starts[-1] * heads)]


def test_it_serves_hopper_alone(monkeypatch):
    asked = (512, 576, torch.bfloat16, 64, torch.device("cpu"))
    assert not hopper.serves(*asked)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert hopper.serves(*asked)
    assert not hopper.serves(512, 576, torch.float32, *asked[3:])
    assert not hopper.serves(256, 320, *asked[2:])
    assert not hopper.serves(512, 576, torch.bfloat16, 24, torch.device("cpu"))


def test_every_form_compiles_once_for_all_counts(tmp_path):
    code = """
from dataclasses import replace
from sametoken.ops.model.latent_attention import hopper
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.backend import AttentionRows, RowRuns

table = torch.zeros(64, 256, dtype=torch.int64)
memory = LayerLatent(torch.zeros(2, 64, 576, dtype=torch.bfloat16), 512)
for count, width in ((1, 1), (2, 3), (16, 16), (17, 1)):
    at = torch.zeros(count * width, dtype=torch.int64)
    q = torch.zeros(len(at), 20, 576, dtype=torch.bfloat16)
    starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
    rows = AttentionRows(at, at, at, table, RowRuns(count, width, starts, count // 2, width))
    for config in (hopper.CONFIGS[32], replace(hopper.CONFIGS[64], programs=0)):
        hopper.attention(q, 0.07, rows, memory, config=config)
"""
    compile_launches(code, tmp_path)
    assert len(list(tmp_path.rglob("*_kernel.ptx"))) == 3

"""Attention on Hopper, its kernels run in Python: values, and a row's bits in every launch form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from helpers.few_programs import choosing, few
from helpers.gluon_interpreter import interpreted
from helpers.gluon_shared import Descriptor
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention import hopper, reference
from sametoken.ops.model.attention.kv import FLOAT8, KVScales

#: Of three slots; the last of the table has no request.
LENGTHS = [4700, 1300, 40]
DEAD = (3, 0)


@dataclass(frozen=True)
class Scene:
    """Keys and values in shuffled blocks; elsewhere keys are NaN and values as large as can be."""

    shape: AttentionShape
    table: Tensor
    kv: LayerKV
    queries: Tensor  # by slot and position

    @classmethod
    def of(cls, shape: AttentionShape, block_size: int, dtype=torch.bfloat16) -> Scene:
        random = torch.Generator().manual_seed(0)
        per_slot = -(-max(LENGTHS) // block_size) + 1
        table = torch.randperm(4 * per_slot, generator=random).view(4, per_slot)
        size = (4 * per_slot, shape.num_kv_heads, block_size, shape.head_dim)
        keys = torch.full(size, torch.nan, dtype=dtype)
        values = torch.full(size, torch.finfo(dtype).max, dtype=dtype)
        for slot, length in enumerate(LENGTHS):
            at = torch.arange(length)
            where = (table[slot, at // block_size], slice(None), at % block_size)
            own = torch.randn(2, length, *size[1::2], generator=random).to(dtype)
            keys[where], values[where] = own
        queries = torch.randn(4, max(LENGTHS), shape.num_heads, size[3], generator=random)
        return cls(shape, table, LayerKV(keys, values), queries.to(dtype))

    def run(self, where, runs, config=None, sinks=None, seed=0) -> Tensor:
        """Attention of rows [slot, position] in these runs."""
        slots, positions = (one.contiguous() for one in torch.tensor(where).T)
        rows = AttentionRows(positions, slots, torch.zeros_like(slots), self.table, runs)
        q, arrived = self.queries[slots, positions], hopper.counters(self.table.device)
        with interpreted(seed):
            out = hopper.attention(q, self.shape, rows, self.kv, arrived, sinks, config=config)
        assert not arrived.any()
        return out

    def expected(self, where, sinks=None) -> Tensor:
        slots, positions = torch.tensor(where).T
        rows = AttentionRows(positions, slots, torch.zeros_like(slots), self.table)
        return reference.attention(self.queries[slots, positions], self.shape, rows, self.kv, sinks)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(hopper, "choose", choosing(hopper.choose))


def forms(shape: AttentionShape, programs: tuple[int, ...]) -> list[hopper.HopperConfig]:
    """All launch forms, splits by few and by many programs."""
    table = hopper.table_for(shape)
    spread = [replace(table.splits, programs=count) for count in programs]
    sizes = [size for size in hopper.COLUMNS if shape.num_heads // shape.num_kv_heads <= size]
    columns = [replace(table.columns, programs=n, columns=size) for n in programs for size in sizes]
    others = (table.few, table.few_columns, table.narrow, table.wide)
    return [*spread, *columns, *map(few, others)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window", "has_sinks"),
    [
        ((4, 2), 64, 16, None, False), ((8, 1), 128, 64, None, True),
        ((2, 1), 256, 128, None, False), ((6, 2), 96, 32, 300, True),
        # Windows that begin within a split, before and after its middle, of one tile and several.
        ((8, 1), 64, 64, 128, True), ((2, 2), 256, 16, 700, False),
    ],
)  # fmt: skip
def test_every_form_has_the_reference_s_values_and_equal_bits(
    heads, head_dim, block_size, window, has_sinks
):
    """Of a chunk, a window and single rows in uneven runs with dead rows and a run without rows."""
    shape = AttentionShape(*heads, head_dim, sliding_window=window)
    scene = Scene.of(shape, block_size)
    # Far above and below all scores, too.
    sinks = torch.tensor([300.0, -300.0] + [0.5] * (heads[0] - 2)) if has_sinks else None
    end = LENGTHS[0] if window else 1100
    where = [(0, at) for at in range(end - 9, end)] + [DEAD, (1, 1299), (1, 1023), DEAD]
    where += [(2, at) for at in range(3)]
    runs = runs_of([10, 1, 2, 0, 3])
    live = torch.tensor([slot < 3 for slot, _ in where])
    expected = scene.expected([at for at in where if at != DEAD], sinks)
    first = None
    for seed, config in enumerate(forms(shape, (1, 3, 8))):
        out = scene.run(where, runs, config, sinks, seed)
        torch.testing.assert_close(out[live], expected, rtol=2e-2, atol=2e-2)
        assert not out[~live].any()
        first = out if first is None else first
        assert torch.equal(out, first)


@pytest.mark.parametrize("window", [None, 100])
def test_prompts_windows_and_single_rows_have_equal_bits(window):
    shape = AttentionShape(4, 2, 64, sliding_window=window)
    scene = Scene.of(shape, 64)
    prompt = scene.run([(1, at) for at in range(400)], RowRuns.even(1, 400))
    for first, last in ((0, 3), (63, 66), (254, 258), (397, 400)):
        where = [(1, at) for at in range(first, last)]
        together = scene.run(where, RowRuns.even(1, last - first))
        alone = scene.run(where, RowRuns.even(last - first, 1), seed=1)
        assert torch.equal(together, prompt[first:last])
        assert torch.equal(alone, prompt[first:last])


def test_values_that_are_not_finite_spoil_only_rows_that_see_them():
    shape = AttentionShape(2, 1, 64)
    scene = Scene.of(shape, 16)
    where, runs = [(1, at) for at in range(290, 310)], RowRuns.even(1, 20)
    expected = scene.run(where, runs)
    scene.kv.keys[scene.table[1, 300 // 16], :, 300 % 16] = torch.nan
    for config in forms(shape, (2,)):
        found = scene.run(where, runs, config)
        assert torch.equal(found[:10], expected[:10])
        assert found[10:].isnan().all()


def test_blocks_behind_a_query_tile_are_not_read(monkeypatch):
    """What a table has behind a request's last block is a finished request's."""
    shape = AttentionShape(2, 1, 64)
    scene = Scene.of(shape, 64)
    read, read_box = [], Descriptor.read

    def noted(self, at):
        read.append(int(at[0]) // 64)
        return read_box(self, at)

    monkeypatch.setattr(Descriptor, "read", noted)
    ends = [20, 300, 1299]
    own = {int(block) for end in ends for block in scene.table[1, : end // 64 + 1]}
    for config in forms(shape, (2,)):
        read.clear()
        for end in ends:
            scene.run([(1, end - 1), (1, end)], RowRuns.even(1, 2), config)
        assert {*read} == own


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window", "has_scales"),
    [
        ((4, 2), 64, 16, None, True),
        ((8, 1), 128, 64, None, False),
        ((2, 1), 256, 128, None, True),
        ((6, 2), 96, 32, 300, True),
    ],
)
def test_float8_has_the_bits_of_its_numbers_in_16_bits(
    heads, head_dim, block_size, window, has_scales
):
    """Scales are powers of two."""
    shape = AttentionShape(*heads, head_dim, sliding_window=window)
    scene = Scene.of(shape, block_size)
    stored = [one.to(FLOAT8) for one in (scene.kv.keys, scene.kv.values)]
    factors = 2.0 ** torch.arange(-1, 2 * heads[1] - 1).view(2, heads[1])
    scales = KVScales(*factors) if has_scales else None
    narrow = replace(scene, kv=LayerKV(*stored, scales))
    by_head = factors.view(2, heads[1], 1, 1) if has_scales else torch.ones(2)
    read = [one.float() * own for one, own in zip(stored, by_head, strict=True)]
    wide = replace(scene, kv=LayerKV(*(one.bfloat16() for one in read)))
    end = 1100
    where = [(0, at) for at in range(end - 9, end)] + [DEAD, (1, 1299), (1, 1023), DEAD]
    where += [(2, at) for at in range(3)]
    runs = runs_of([10, 1, 2, 0, 3])
    first, *others = forms(shape, (3,))
    expected = wide.run(where, runs, first)
    for seed, config in enumerate((first, *others)):
        assert torch.equal(narrow.run(where, runs, config, None, seed), expected)

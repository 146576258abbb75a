"""Batch invariance of attention on Hopper: every form, at every border of splits, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention import hopper

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)

QWEN3, QWEN35 = AttentionShape(32, 8, 128), AttentionShape(16, 4, 256)
GPT_OSS = AttentionShape(64, 8, 64)
#: Shape, sliding window, block size, dtype, and about what logit sinks have, if there are any.
KINDS = [
    (QWEN3, None, 64, torch.bfloat16), (QWEN3, 300, 64, torch.bfloat16),
    (QWEN3, None, 16, torch.bfloat16), (QWEN3, None, 128, torch.bfloat16),
    (QWEN35, None, 64, torch.bfloat16), (QWEN35, 100, 32, torch.bfloat16),
    (AttentionShape(9, 3, 64), 1000, 32, torch.float16),
    (AttentionShape(8, 2, 80), None, 64, torch.bfloat16),
    (AttentionShape(6, 6, 96), None, 64, torch.bfloat16),
    (AttentionShape(28, 4, 128, score_factor=0.12), None, 64, torch.bfloat16),
    (AttentionShape(8, 1, 192), None, 64, torch.bfloat16),
    (GPT_OSS, 128, 64, torch.bfloat16, 0.0), (GPT_OSS, None, 64, torch.bfloat16, 0.0),
    (GPT_OSS, 128, 16, torch.bfloat16, 300.0), (GPT_OSS, None, 64, torch.bfloat16, -300.0),
    (QWEN3, None, 64, torch.float16, 2.0), (QWEN35, 300, 64, torch.bfloat16, 2.0),
]  # fmt: skip
LENGTHS = (5400, 700, 130)
DEAD = len(LENGTHS)
#: Beside the ends of tiles and of splits.
PLACES = (0, 1, 63, 64, 127, 128, 255, 256, 257, 1023, 1024, 1025, 1535, 1536, 4095, 4096, 5399)


class Scene:
    """Slots of given lengths in shuffled blocks; other keys are NaN, other values are large."""

    def __init__(self, shape, window, block_size, dtype, level=None):
        self.shape, self.block_size = replace(shape, sliding_window=window), block_size
        generator = torch.Generator("cuda").manual_seed(0)
        counts = [-(-length // block_size) for length in LENGTHS]
        num_blocks = sum(counts)
        order = torch.randperm(num_blocks, device="cuda", generator=generator).split(counts)
        self.table = torch.full((DEAD + 1, max(counts)), num_blocks, device="cuda")
        size = (num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
        self.kv = LayerKV(
            torch.full(size, torch.nan, dtype=dtype, device="cuda"),
            torch.full(size, 60000.0, dtype=dtype, device="cuda"),
        )
        for slot, (length, blocks) in enumerate(zip(LENGTHS, order, strict=True)):
            self.table[slot, : len(blocks)] = blocks
            keys, values = (
                torch.randn((length, *size[1:2], size[3]), device="cuda", generator=generator)
                for _ in range(2)
            )
            self.kv.keys[self.at(slot, range(length))] = keys.to(dtype)
            self.kv.values[self.at(slot, range(length))] = values.to(dtype)
        size = (DEAD + 1, max(LENGTHS), shape.num_heads, shape.head_dim)
        self.queries = torch.randn(size, device="cuda", generator=generator).to(dtype)
        self.queries[DEAD] = torch.nan
        self.sinks = None
        if level is not None:
            self.sinks = level + torch.linspace(-3, 3, shape.num_heads, device="cuda")
        self.arrived = hopper.counters(torch.device("cuda"))

    def at(self, slot, positions):
        """Where in a memory the positions of a slot are."""
        places = torch.tensor(positions, device="cuda")
        blocks = self.table[slot, places // self.block_size]
        return blocks, slice(None), places % self.block_size

    def run(self, where, runs, config=None):
        slots, positions = torch.tensor(where, device="cuda").unbind(1)
        slots, positions = slots.contiguous(), positions.contiguous()
        rows = AttentionRows(positions, slots, slots, self.table, runs)
        q = self.queries[slots, positions]
        out = hopper.attention(
            q, self.shape, rows, self.kv, self.arrived, self.sinks, config=config
        )
        assert int(self.arrived.abs().max()) == 0
        return out

    def exact(self, slot, position):
        first = max(0, position + 1 - (self.shape.sliding_window or position + 1))
        at = self.at(slot, range(first, position + 1))
        k, v = (memory[at].double().transpose(0, 1) for memory in (self.kv.keys, self.kv.values))
        grouped = self.queries[slot, position].double().unflatten(0, (len(k), -1))
        scores = grouped @ k.mT * self.shape.scale
        if self.sinks is not None:
            beside = self.sinks.double().view(*scores.shape[:2], 1)
            scores, v = torch.cat((scores, beside), 2), F.pad(v, (0, 0, 0, 1))
        return (torch.softmax(scores, dim=-1) @ v).flatten()


@functools.lru_cache(maxsize=1)
def scene_and_rows(kind):
    """A scene, and all rows of its first slot as one prompt."""
    scene = Scene(*kind)
    where = [(0, position) for position in range(LENGTHS[0])]
    wide = hopper.table_for(scene.shape).wide
    return scene, where, scene.run(where, RowRuns.even(1, len(where)), wide)


def forms(scene):
    table = hopper.table_for(scene.shape)
    seven = replace(table.splits, programs=7)
    found = {
        "splits": table.splits, "seven programs": seven, "few": table.few, "narrow": table.narrow,
        "wide": table.wide,
    }  # fmt: skip
    for size in hopper.COLUMNS:
        if scene.shape.num_heads // scene.shape.num_kv_heads <= size:
            found[f"{size} columns"] = replace(table.columns, columns=size)
            found[f"few of {size} columns"] = replace(table.few_columns, columns=size)
            found[f"{size} columns, seven"] = replace(table.columns, columns=size, programs=7)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_form(kind):
    scene, where, rows = scene_and_rows(kind)
    some = [where[place] for place in PLACES]
    exact = torch.stack([scene.exact(*place) for place in some])
    # All but 0 where sinks have all weight.
    assert (rows[list(PLACES)].double() - exact).norm() <= 3e-3 * exact.norm() + 1e-30
    for name, config in forms(scene).items():
        group = scene.shape.num_heads // scene.shape.num_kv_heads
        many = 1000 if config.columns else 3000  # A launch has a limit of query tiles.
        assert many <= hopper.MAX_TILES * ((config.columns or 64) // group)
        chunk = scene.run(where[-many:], RowRuns.even(1, many), config)
        assert torch.equal(chunk, rows[-many:]), name
        alone = scene.run(some, RowRuns.even(len(some), 1), config)
        assert torch.equal(alone, rows[list(PLACES)]), name
        for last in (3, 64, 255, 258, 1027, 1540, 4100, 5399):
            for width in (2, 4, 17):
                begin = max(last + 1 - width, 0)
                runs = RowRuns.even(1, last + 1 - begin)
                got = scene.run(where[begin : last + 1], runs, config)
                assert torch.equal(got, rows[begin : last + 1]), (name, last, width)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_runs_have_the_bits_of_single_rows(kind):
    """Short runs and long ones, an empty one, and dead rows that hold NaN."""
    scene, where, rows = scene_and_rows(kind)
    others = [(1, at) for at in range(500, 517)] + [(2, at) for at in range(30, 129)]
    mixed = [where[700], *where[298:301], (DEAD, 0), *others, *where[4000:4070]]
    mixed += [(DEAD, 0)] * 40
    live = torch.tensor([slot != DEAD for slot, _ in mixed], device="cuda")
    single = scene.run(others, RowRuns.even(len(others), 1), forms(scene)["splits"])
    expected = torch.cat([rows[[700, 298, 299, 300]], single, rows[4000:4070]])
    for name, config in (forms(scene) | {"chosen": None}).items():
        for num_short in (0, 4, 6):
            runs = runs_of([1, 4, 0, 17, 99, 110], num_short, "cuda")
            got = scene.run(mixed, runs, config)
            assert torch.equal(got[live], expected), (name, num_short)
            assert not got[~live].any(), (name, num_short)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], KINDS[11]])
def test_chosen_launches_agree_at_every_batch_size(kind):
    scene, where, rows = scene_and_rows(kind)
    for batch in (1, 2, 8, 16, 64, 128, 300):
        for width in (1, 4, 16):
            got = scene.run(where[-width:] * batch, RowRuns.even(batch, width))
            assert torch.equal(got, rows[-width:].repeat(batch, 1)), (batch, width)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]])
def test_a_captured_launch_follows_lengths_and_tables(kind):
    scene, _, _ = scene_and_rows(kind)
    slots = torch.tensor([0, 1], device="cuda").repeat_interleave(4)
    positions = torch.zeros(8, dtype=torch.int64, device="cuda")
    q = scene.queries[slots, positions]
    # What is replayed finds other runs among the rows.
    starts = torch.tensor([0, 4, 4], device="cuda")
    rows = AttentionRows(positions, slots, slots, scene.table, RowRuns(2, 8, starts, 2, 8))

    def launch():
        return hopper.attention(q, scene.shape, rows, scene.kv, scene.arrived)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for last_0, last_1, first in ((4, 500, 3), (255, 256, 4), (5399, 7, 1), (4097, 529, 5)):
        where = [(0, at) for at in range(last_0 + 1 - first, last_0 + 1)]
        where += [(1, at) for at in range(last_1 + first - 7, last_1 + 1)]
        now = torch.tensor(where, device="cuda")
        starts.copy_(torch.tensor([0, first, 8]))
        slots.copy_(now[:, 0])
        positions.copy_(now[:, 1])
        q.copy_(scene.queries[now[:, 0], now[:, 1]])
        graph.replay()
        assert torch.equal(out, scene.run(where, RowRuns.even(8, 1)))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[4], KINDS[11]])
def test_a_key_that_is_not_finite_reaches_no_row_that_cannot_see_it(kind):
    """What is written for values that are not finite: the value 0 and a key of NaN."""
    poisoned = (250, 257, 300)
    scene = Scene(*kind)
    where = [(0, at) for at in range(247, 311)]
    clean = scene.run(where, RowRuns.even(1, 64))
    scene.kv.keys[scene.at(0, poisoned)] = torch.nan
    window = scene.shape.sliding_window or 1000
    sees = torch.tensor([any(at - window < bad <= at for bad in poisoned) for _, at in where])
    assert 0 < int(sees.sum()) < 64
    for name, config in forms(scene).items():
        for width in (1, 4, 64):
            got = scene.run(where, RowRuns.even(64 // width, width), config)
            assert torch.equal(got[~sees.cuda()], clean[~sees.cuda()]), (name, width)
            assert not got[sees.cuda()].isfinite().any(), (name, width)

"""Batch invariance of attention on a chip: decode, verify and prefill rows, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers.rows import runs_of
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    RowRuns,
)
from sametoken.ops.model.attention.triton import (
    SPLIT,
    AttentionConfig,
    attention,
    choose,
)

QWEN3 = AttentionShape(32, 8, 128)
QWEN35 = AttentionShape(16, 4, 256)
GEMMA4 = AttentionShape(16, 2, 512)
LENGTHS = [1100, 530, 256, 65, 1]


class Scene:
    """Slots of given lengths in shuffled blocks; all other KV memory is NaN."""

    def __init__(self, shape, lengths=LENGTHS, *, dtype=torch.bfloat16, block_size=16):
        self.shape, self.lengths = shape, lengths
        generator = torch.Generator("cuda").manual_seed(0)
        max_blocks = -(-max(lengths) // block_size) + 3
        num_blocks = max_blocks * len(lengths)
        order = torch.randperm(num_blocks, device="cuda", generator=generator)
        reserved = torch.full((1, max_blocks), num_blocks, device="cuda")
        self.table = torch.cat((order.view(len(lengths), max_blocks), reserved))
        size = (2, num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
        memory = torch.full(size, torch.nan, dtype=dtype, device="cuda")
        self.kv = LayerKV(memory[0], memory[1])
        size = (2, len(lengths), max(lengths), shape.num_kv_heads, shape.head_dim)
        self.history = torch.randn(size, device="cuda", generator=generator).to(dtype)
        for slot, length in enumerate(lengths):
            at = torch.arange(length, device="cuda")
            blocks = self.table[slot, at // block_size]
            memory[:, blocks, :, at % block_size] = self.history[:, slot, :length].transpose(0, 1)
        size = (len(lengths) + 1, max(lengths), shape.num_heads, shape.head_dim)
        self.queries = torch.randn(size, device="cuda", generator=generator).to(dtype)

    def run(self, where, window=1, *, runs=None, sliding_window=None, **options):
        """Rows of (slot, position) pairs as windows of ``window``, or as ``runs``: [T, H * D]."""
        slots, positions = torch.tensor(where, device="cuda").unbind(1)
        slots, positions = slots.contiguous(), positions.contiguous()
        q = self.queries[slots, positions]
        runs = runs or RowRuns.even(len(where) // window, window)
        rows = AttentionRows(positions, slots, torch.zeros_like(slots), self.table, runs)
        shape = replace(self.shape, sliding_window=sliding_window)
        return attention(q, shape, rows, self.kv, **options)

    def exact(self, slot, position, sliding_window=None, sinks=None):
        first = max(0, position + 1 - sliding_window) if sliding_window else 0
        k, v = self.history[:, slot, first : position + 1].double().transpose(1, 2)
        grouped = self.queries[slot, position].double().unflatten(0, (len(k), -1))
        scores = grouped @ k.mT * self.shape.scale
        if sinks is not None:
            beside = sinks.double().view(*scores.shape[:2], 1)
            scores, v = torch.cat((scores, beside), 2), F.pad(v, (0, 0, 0, 1))
        return (torch.softmax(scores, dim=-1) @ v).flatten()


def window(slot, last, width):
    return [(slot, position) for position in range(last - width + 1, last + 1)]


FORMS = ("sequential", "split_kv")

#: Queries, warps and stages of a program, and whether KV is the left operand.
TILES = (
    (16, 2, 2, True), (16, 2, 3, True), (16, 4, 2, True), (16, 4, 5, True), (16, 8, 3, True),
    (32, 4, 5, True), (64, 8, 3, True), (16, 4, 2, False), (64, 4, 2, False), (64, 8, 2, False),
    (128, 8, 2, False),
)  # fmt: skip


def config_of(form, queries=16, warps=4, stages=3, split=SPLIT, kv_left=True, tile=64):
    return AttentionConfig(form, queries, warps, stages, split=split, kv_left=kv_left, tile=tile)


def tile_of(shape):
    """The tile that the engine gives heads of this size."""
    return choose(1, 1, shape, SPLIT, torch.bfloat16).tile


@pytest.mark.parametrize(("block_size", "sliding_window"), [(16, None), (32, 100)])
@pytest.mark.parametrize(
    "shape",
    [
        QWEN3,
        AttentionShape(9, 3, 64),
        AttentionShape(8, 2, 80),
        AttentionShape(6, 6, 96),
        AttentionShape(28, 4, 128),
        AttentionShape(8, 1, 256, score_factor=0.1),
        GEMMA4,
    ],
)
def test_prefill_verify_and_decode_rows_are_equal(shape, block_size, sliding_window):
    scene = Scene(shape, block_size=block_size)
    options = {"sliding_window": sliding_window}
    tile = tile_of(shape)
    whole = [(0, position) for position in range(1100)]
    prefill = scene.run(whole, 1100, config=config_of("sequential", 32, tile=tile), **options)
    for position in (0, 1, 15, 16, 63, 64, 255, 256, 257, 511, 700, 1099):
        for form in FORMS:
            alone = scene.run(
                [(0, position)], window=1, config=config_of(form, tile=tile), **options
            )
            assert torch.equal(alone[0], prefill[position]), (position, form)
    for last in (64, 66, 256, 258, 515, 1099):
        for width in (2, 4, 6, 17, 65):
            rows = window(0, last, min(width, last + 1))
            for form in FORMS:
                config = config_of(form, tile=tile)
                verified = scene.run(rows, window=len(rows), config=config, **options)
                expected = prefill[last + 1 - len(rows) : last + 1]
                assert torch.equal(verified, expected), (last, width, form)
    exact = torch.stack([scene.exact(0, position, sliding_window) for _, position in whole])
    assert (prefill.double() - exact).norm() / exact.norm() < 6e-3


@pytest.mark.parametrize("level", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("sliding_window", [None, 128])
def test_sinks_keep_the_law_and_overflow_nowhere(sliding_window, level):
    scene = Scene(AttentionShape(64, 8, 64))
    sinks = level + torch.linspace(-3, 3, 64, device="cuda")
    options = {"sliding_window": sliding_window, "sinks": sinks}
    tile = tile_of(scene.shape)
    whole = [(0, position) for position in range(1100)]
    prefill = scene.run(whole, 1100, config=config_of("sequential", 32, tile=tile), **options)
    for position in (0, 1, 63, 64, 127, 128, 255, 256, 257, 700, 1099):
        for form in FORMS:
            config = config_of(form, tile=tile)
            alone = scene.run([(0, position)], window=1, config=config, **options)
            assert torch.equal(alone[0], prefill[position]), (position, form)
    exact = torch.stack([scene.exact(0, at, sliding_window, sinks) for _, at in whole])
    assert (prefill.double() - exact).norm() <= 6e-3 * exact.norm() + 1e-30
    assert prefill.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "split"), [(QWEN3, 64), (QWEN3, 128), (QWEN3, 256), (QWEN35, 128), (GEMMA4, 128)]
)
def test_tiles_warps_and_stages_do_not_matter(shape, split):
    scene = Scene(shape)
    tile = tile_of(shape)
    # The queries of a program have to fit in shared memory.
    most = 128 if shape.head_dim <= 256 else 64
    rows = window(0, 1000, 12)
    expected = scene.run(rows, window=1, config=config_of("split_kv", split=split, tile=tile))
    for form in FORMS:
        for queries, warps, stages, kv_left in [sizes for sizes in TILES if sizes[0] <= most]:
            config = config_of(form, queries, warps, stages, split, kv_left, tile)
            for width in (1, 3, 4, 12):
                got = scene.run(rows, window=width, config=config)
                assert torch.equal(got, expected), (config, width)
    for queries, kv_left in ((16, True), (64, True), (64, False), (128, False)):
        config = config_of("sequential", min(queries, most), 8, 2, split, kv_left, tile)
        got = scene.run(rows, runs=runs_of([5, 0, 7], 1, "cuda"), config=config)
        assert torch.equal(got, expected), (queries, kv_left)


def test_place_and_company_do_not_matter():
    scene = Scene(QWEN3)
    expected = scene.run([(1, 500)], window=1)
    crowd = [(0, 1000), (2, 255), (3, 64), (4, 0), (5, 0)]
    for count in (1, 2, 8, 40, 102):
        for place in {0, count // 2, count}:
            where = (crowd * 30)[:count]
            where.insert(place, (1, 500))
            assert torch.equal(scene.run(where)[place], expected[0])
            runs = runs_of([1] * len(where), place, "cuda")
            assert torch.equal(scene.run(where, runs=runs)[place], expected[0])


@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("shape", [QWEN3, QWEN35, GEMMA4])
def test_ragged_runs_have_the_bits_of_single_rows(shape, form, sliding_window):
    """Short runs and long ones, an empty one, and dead rows that hold NaN."""
    scene = Scene(shape)
    scene.queries[5] = torch.nan
    config = form and config_of(form, 32, tile=tile_of(shape))
    runs = [
        [(4, 0)], [*window(1, 300, 3), (5, 0)], [], [(5, 0)] * 2, window(2, 200, 17),
        window(3, 64, 65), [*window(0, 900, 70), *[(5, 0)] * 40],
    ]  # fmt: skip
    where = [pair for run in runs for pair in run]
    lengths = [len(run) for run in runs]
    live = torch.tensor([slot != 5 for slot, _ in where], device="cuda")
    options = {"sliding_window": sliding_window, "config": config}
    expected = scene.run(where, **options)[live]
    for num_short in (0, 4, 5, 7):
        got = scene.run([*where, (5, 0)], runs=runs_of(lengths, num_short, "cuda"), **options)
        assert torch.equal(got[:-1][live], expected), num_short


@pytest.mark.parametrize("shape", [QWEN3, QWEN35, GEMMA4])
def test_chosen_launches_agree_at_every_batch_size(shape):
    scene = Scene(shape)
    expected = scene.run(window(0, 900, 4), window=4)
    for batch in (1, 2, 8, 16, 64, 128):
        got = scene.run(window(0, 900, 4) * batch, window=4)
        assert torch.equal(got, expected.repeat(batch, 1)), batch
        bounded = scene.run(window(0, 900, 4) * batch, window=4, max_seq_len=901)
        assert torch.equal(bounded, got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [AttentionShape(6, 2, 64), GEMMA4])
def test_other_types(shape, dtype):
    scene = Scene(shape, [300], dtype=dtype)
    prefill = scene.run([(0, position) for position in range(300)], 300)
    exact = torch.stack([scene.exact(0, position) for position in range(300)])
    tolerance = 1e-3 if dtype == torch.float16 else 1e-5
    assert (prefill.double() - exact).norm() / exact.norm() < tolerance
    for position in (0, 64, 255, 299):
        alone = scene.run([(0, position)], window=1)
        assert torch.equal(alone[0], prefill[position])


@pytest.mark.parametrize("form", FORMS)
def test_a_captured_launch_follows_lengths_and_tables(form):
    scene = Scene(QWEN3)
    slots = torch.tensor([0, 1], device="cuda").repeat_interleave(4)
    positions = torch.zeros(8, dtype=torch.int64, device="cuda")
    q = torch.zeros(8, 32, 128, dtype=torch.bfloat16, device="cuda")
    # What is replayed finds other runs among the rows.
    starts = torch.tensor([0, 4, 4], device="cuda")
    ragged = RowRuns(2, 8, starts, 2, 8)
    rows = AttentionRows(positions, slots, torch.zeros_like(slots), scene.table, ragged)

    def launch():
        return attention(q, QWEN3, rows, scene.kv, config=config_of(form))

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for last_0, last_1, first in ((4, 500, 3), (255, 256, 4), (1099, 7, 1), (700, 529, 5)):
        where = window(0, last_0, first) + window(1, last_1, 8 - first)
        where = torch.tensor(where, device="cuda")
        starts.copy_(torch.tensor([0, first, 8]))
        slots.copy_(where[:, 0])
        positions.copy_(where[:, 1])
        q.copy_(scene.queries[where[:, 0], where[:, 1]])
        graph.replay()
        assert torch.equal(out, scene.run(where.tolist(), window=1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_value_that_is_not_finite_reaches_no_row_that_cannot_see_it(sliding_window, value):
    poisoned = (250, 257, 300)
    scene = Scene(QWEN3)
    rows = window(0, 310, 64) + window(1, 310, 64)
    options = {"sliding_window": sliding_window}
    clean = scene.run(rows, window=64, config=config_of("sequential"), **options)
    for position in poisoned:
        scene.kv.values[scene.table[0, position // 16], :, position % 16] = value
    first = [0 if sliding_window is None else at + 1 - sliding_window for _, at in rows]
    sees = torch.tensor(
        [
            slot == 0 and any(low <= bad <= at for bad in poisoned)
            for (slot, at), low in zip(rows, first, strict=True)
        ]
    )
    assert 0 < int(sees.sum()) < 64
    for form in FORMS:
        for queries, width in [(16, 2), (16, 4), (32, 8), (32, 64)]:
            got = scene.run(rows, window=width, config=config_of(form, queries), **options)
            assert torch.equal(got[~sees.cuda()], clean[~sees.cuda()]), (form, queries, width)
            assert not got[sees.cuda()].isfinite().any()
    ragged = scene.run(
        rows, runs=runs_of([64, 64], 1, "cuda"), config=config_of("sequential", 32), **options
    )
    assert torch.equal(ragged[~sees.cuda()], clean[~sees.cuda()])
    assert not ragged[sees.cuda()].isfinite().any()

"""The Triton attention under the interpreter: values, masks, poison, and launch forms.

The interpreter multiplies through numpy, whose order of additions follows the shape, so rows
are compared closely here and by their bits on the chip (tests/gpu/test_attention_gpu.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from helpers.compiled import compile_launches
from helpers.rows import runs_of
from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns
from sametoken.ops.model.attention import reference
from sametoken.ops.model.attention.triton import AttentionConfig, attention, choose

SEQUENTIAL = AttentionConfig("sequential", 16, num_warps=4, num_stages=2, split=32, tile=16)
SPLIT_KV = replace(SEQUENTIAL, form="split_kv", programs=48)
#: Both forms, in either operand order.
CONFIGS = (
    SEQUENTIAL,
    SPLIT_KV,
    replace(SEQUENTIAL, kv_left=False),
    replace(SPLIT_KV, kv_left=False),
)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
BLOCK_SIZE = 16


class Scene:
    """Slots whose KV lies in shuffled blocks of a memory that is NaN where nothing is read."""

    def __init__(self, shape, lengths, *, dtype=torch.float32, block_size=BLOCK_SIZE, seed=0):
        torch.manual_seed(seed)
        self.shape = shape
        max_blocks = -(-max(lengths) // block_size) + 2
        num_blocks = max_blocks * len(lengths)
        self.table = torch.randperm(num_blocks).view(len(lengths), max_blocks)
        self.table = torch.cat((self.table, torch.full((1, max_blocks), num_blocks)))
        size = (num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
        self.kv = LayerKV(
            torch.full(size, torch.nan, dtype=dtype), torch.full(size, torch.nan, dtype=dtype)
        )
        self.kv.keys[-1] = self.kv.values[-1] = 9.0
        self.keys = [torch.randn(n, shape.num_kv_heads, shape.head_dim).to(dtype) for n in lengths]
        self.values = [torch.randn_like(keys) for keys in self.keys]
        for slot, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for position in range(len(keys)):
                block = self.table[slot, position // block_size]
                self.kv.keys[block, :, position % block_size] = keys[position]
                self.kv.values[block, :, position % block_size] = values[position]
        self.dtype = dtype

    def rows(self, where):
        """AttentionRows of (slot, position) pairs and random queries for them."""
        slots, positions = (torch.tensor(column) for column in zip(*where, strict=True))
        generator = torch.Generator().manual_seed(1)
        size = (200, self.shape.num_heads, self.shape.head_dim)
        everywhere = torch.randn(size, generator=generator).to(self.dtype)
        q = everywhere[(slots * 67 + positions) % 200]
        return q, AttentionRows(positions, slots, torch.zeros_like(slots), self.table)

    def expected(self, q, rows, sliding_window=None, sinks=None):
        out = torch.empty(len(q), self.shape.num_heads * self.shape.head_dim, dtype=torch.float64)
        pairs = zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(pairs):
            first = max(0, position + 1 - sliding_window) if sliding_window else 0
            k = self.keys[slot][first : position + 1].double().transpose(0, 1)
            v = self.values[slot][first : position + 1].double().transpose(0, 1)
            grouped = q[row].double().unflatten(0, (self.shape.num_kv_heads, -1))
            scores = grouped @ k.mT * self.shape.scale
            if sinks is not None:
                beside = sinks.double().view(*scores.shape[:2], 1)
                scores, v = torch.cat((scores, beside), 2), F.pad(v, (0, 0, 0, 1))
            out[row] = (torch.softmax(scores, dim=-1) @ v).flatten()
        return out


def window_rows(slot, last, width):
    return [(slot, position) for position in range(last - width + 1, last + 1)]


def run(scene, where, window=1, *, runs=None, sliding_window=None, sinks=None, **options):
    """Rows as windows of ``window``, or as ``runs``; and what they should give."""
    q, rows = scene.rows(where)
    rows = replace(rows, runs=runs or RowRuns.even(len(where) // window, window))
    shape = replace(scene.shape, sliding_window=sliding_window)
    expected = scene.expected(q, rows, sliding_window, sinks)
    return attention(q, shape, rows, scene.kv, sinks, **options), expected


def assert_close(got, expected, tolerance=2e-6):
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def in_both_forms(*cases):
    """Each case in both forms and both operand orders, of which two launches are enough."""
    orders = ((CONFIGS[0], CONFIGS[3]), (CONFIGS[2], CONFIGS[1]))
    return [(case, config) for at, case in enumerate(cases) for config in orders[at % 2]]


@pytest.mark.parametrize(
    ("shape", "config"),
    in_both_forms(
        AttentionShape(3, 3, 16),
        AttentionShape(6, 2, 20),
        AttentionShape(4, 1, 24, score_factor=0.3),
        AttentionShape(18, 1, 16),
    ),
)
def test_odd_head_counts_and_sizes(shape, config):
    block_queries = 32 if shape.num_heads == 18 else 16
    tiled = replace(config, block_queries=block_queries)
    scene = Scene(shape, [70, 33])
    where = [(0, 69), (1, 31), (0, 0)]
    assert_close(*run(scene, where, window=1, config=tiled))


@pytest.mark.parametrize("form", ["sequential", "split_kv"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_heads_of_512_elements(dtype, tolerance, form):
    scene = Scene(AttentionShape(4, 1, 512), [150], dtype=dtype)
    config = replace(choose(1, 3, scene.shape, 150, dtype), form=form)
    assert_close(*run(scene, window_rows(0, 148, 3), window=3, config=config), tolerance)


@pytest.mark.parametrize(("edge", "config"), in_both_forms((14, 16), (31, 24), (32, 16), (66, 24)))
def test_windows_across_every_edge(edge, config):
    last, block_size = edge
    scene = Scene(SHAPE, [70, 70], block_size=block_size)
    where = window_rows(1, last, 3) + window_rows(0, 45, 3)
    assert_close(*run(scene, where, window=3, config=config))


@pytest.mark.parametrize(
    ("block_queries", "config"),
    [(16, SPLIT_KV), (16, SEQUENTIAL), (64, SEQUENTIAL), (32, SPLIT_KV)],
)
def test_a_window_longer_than_a_query_tile(block_queries, config):
    scene = Scene(SHAPE, [40])
    tiled = replace(config, block_queries=block_queries)
    assert_close(*run(scene, window_rows(0, 37, 19), window=19, config=tiled))


#: Runs of a step: slot, first position, rows, and dead rows behind them.
RAGGED = (
    *((0, 40, 1, 0), (1, 0, 3, 2), (2, 5, 0, 1), (2, 9, 0, 0)),
    *((3, 20, 9, 0), (4, 0, 0, 0), (4, 31, 9, 2), (0, 0, 0, 0)),
)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("config", "sliding_window"),
    [
        (SEQUENTIAL, None),
        (replace(SPLIT_KV, programs=8), 7),
        (replace(SEQUENTIAL, kv_left=False), 7),
        (replace(CONFIGS[3], programs=8), None),
    ],
)
def test_ragged_runs_have_the_bits_of_even_ones(config, sliding_window, monkeypatch):
    """Dead rows, and rows behind the runs, hold NaN; the latter stand nowhere.

    Of padded steps too, whose runs have far fewer rows than they may.
    """
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: new_empty(*a, **o).fill_(7e7))
    scene = Scene(SHAPE, [41, 15, 9, 29, 40])
    if sliding_window:
        forget(scene, sliding_window)
    where, live, zero, alone = [], [], [], []
    for slot, first, count, num_dead in RAGGED:
        own = [(slot, first + row) for row in range(count)]
        where += [*own, *[(5, 0)] * num_dead]
        live += [True] * count + [False] * num_dead
        zero += [False] * count + [count > 0] * num_dead
        options = {"sliding_window": sliding_window, "config": config}
        alone += [run(scene, own, count, **options)] if own else []
    bits, expected = (torch.cat(parts) for parts in zip(*alone, strict=True))
    assert_close(bits, expected)
    behind, live = len(where), torch.tensor(live)
    q, rows = scene.rows([*where, (5, 0), (5, 0)])
    q[:behind][~live] = q[behind:] = torch.nan
    rows.slots[behind:] = rows.positions[behind:] = -(10**12)
    lengths = [count + num_dead for _, _, count, num_dead in RAGGED]
    shape = replace(SHAPE, sliding_window=sliding_window)
    for num_short, max_rows in product((0, 4), (11, 40)):
        ragged = replace(rows, runs=replace(runs_of(lengths, num_short), max_rows=max_rows))
        got = attention(q, shape, ragged, scene.kv, config=config)
        assert torch.equal(got[:behind][live], bits)
        assert (got[behind:] == 7e7).all()
        assert not got[:behind][torch.tensor(zero)].any()


def forget(scene, sliding_window):
    """Poison what lies behind the windows of all rows."""
    for slot, first, _, _ in RAGGED:
        for position in range(first + 1 - sliding_window):
            block, offset = scene.table[slot, position // 16], position % 16
            scene.kv.keys[block, :, offset] = scene.kv.values[block, :, offset] = torch.nan


def test_short_and_long_runs_are_launched_for_their_own_sizes(monkeypatch):
    asked = []

    def chosen(*sizes):
        asked.append(sizes[:2])
        return SEQUENTIAL

    monkeypatch.setattr("sametoken.ops.model.attention.triton.choose", chosen)
    scene = Scene(SHAPE, [40, 40, 40])
    where = [*window_rows(0, 9, 2), (1, 5), *window_rows(2, 30, 11)]
    for num_short in (0, 2, 3):
        assert_close(*run(scene, where, runs=runs_of([2, 1, 11], num_short)))
    assert asked == [(3, 11), (2, 2), (1, 11), (3, 11)]


@pytest.mark.parametrize(("sliding_window", "config"), in_both_forms(1, 7, 40))
def test_sliding_window(sliding_window, config):
    scene = Scene(SHAPE, [90])
    where = window_rows(0, 75, 4) + window_rows(0, 89, 4)
    got, expected = run(scene, where, window=4, sliding_window=sliding_window, config=config)
    assert_close(got, expected)
    q, rows = scene.rows(where)
    shape = replace(SHAPE, sliding_window=sliding_window)
    assert_close(reference.attention(q, shape, rows, scene.kv), expected)


@pytest.mark.parametrize(("sliding_window", "config"), in_both_forms(None, 7))
def test_sinks_join_once_whatever_the_number_of_splits(sliding_window, config):
    """exp of one overflows and takes all weight of its head; another takes none."""
    shape = AttentionShape(6, 2, 20, score_factor=0.3)
    scene = Scene(shape, [70, 33])
    sinks = torch.tensor([2.0, -1.0, 300.0, 3.0, -300.0, 0.0])
    where = window_rows(0, 68, 2) + window_rows(1, 1, 2)
    options = {"sliding_window": sliding_window, "config": config}
    got, expected = run(scene, where, 2, sinks=sinks, **options)
    assert_close(got, expected)
    assert not got[:, 40:60].any()
    q, rows = scene.rows(where)
    shape = replace(shape, sliding_window=sliding_window)
    assert_close(reference.attention(q, shape, rows, scene.kv, sinks), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("config", [SEQUENTIAL, SPLIT_KV])
def test_sinks_of_dead_rows_give_zeros(config):
    scene = Scene(SHAPE, [40])
    q, rows = scene.rows([(0, 3), (0, 38), (1, 0)])
    ragged = replace(rows, runs=runs_of([3], 1))
    sinks = torch.tensor([1.0, 2.0, -1.0, 0.0])
    got = attention(q, SHAPE, ragged, scene.kv, sinks, config=config)
    live = AttentionRows(rows.positions[:2], rows.slots[:2], rows.kv_slots[:2], scene.table)
    assert_close(got[:2], scene.expected(q[:2], live, sinks=sinks))
    assert not got[2].any()


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_rows_disturb_nobody_and_fewer_lanes_than_splits_suffice(config):
    config = replace(config, programs=8)
    scene = Scene(SHAPE, [100])
    padding = scene.table.shape[0] - 1
    q, rows = scene.rows([(0, 99), (padding, 0), (padding, 0)])
    got = attention(q, SHAPE, replace(rows, runs=RowRuns.even(3, 1)), scene.kv, config=config)
    real = AttentionRows(rows.positions[:1], rows.slots[:1], rows.kv_slots[:1], scene.table)
    assert_close(got[:1], scene.expected(q[:1], real))
    assert got[1:].isfinite().all()


def test_unread_kv_may_be_anything():
    scene = Scene(SHAPE, [50])
    where = window_rows(0, 37, 2)
    clean, expected = run(scene, where, window=2, config=SPLIT_KV)
    for memory in (scene.kv.keys, scene.kv.values):
        for position in range(38, 50):
            memory[scene.table[0, position // 16], :, position % 16] = torch.inf
    poisoned, _ = run(scene, where, window=2, config=SPLIT_KV)
    assert torch.equal(clean, poisoned)
    assert_close(clean, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("config", "value", "sliding_window", "poisoned"),
    [
        (SEQUENTIAL, torch.nan, None, (38, 40)),
        (SEQUENTIAL, torch.inf, 3, (34, 38)),
        (SEQUENTIAL, torch.nan, 3, (33, 40)),
        (SPLIT_KV, torch.inf, None, (38, 40)),
        (SPLIT_KV, torch.nan, 3, (34, 38)),
        (SPLIT_KV, torch.inf, 3, (33, 40)),
    ],
)
def test_a_value_that_is_not_finite_reaches_no_row_that_cannot_see_it(
    config, value, sliding_window, poisoned
):
    scene = Scene(SHAPE, [41, 41])
    where = window_rows(0, 40, 5) + window_rows(1, 40, 5)
    options = {"sliding_window": sliding_window, "config": config}
    clean, _ = run(scene, where, window=5, **options)
    for position in poisoned:
        scene.kv.values[scene.table[0, position // 16], :, position % 16] = value
    got, _ = run(scene, where, window=5, **options)
    for row, (slot, position) in enumerate(where):
        first = 0 if sliding_window is None else position + 1 - sliding_window
        if slot == 0 and any(first <= at <= position for at in poisoned):
            assert not got[row].isfinite().any()
        else:
            assert_close(got[row], clean[row].double())
    alone, _ = run(scene, [where[2]], window=1, **options)
    torch.testing.assert_close(got[2], alone[0], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("config", [SEQUENTIAL, SPLIT_KV])
def test_ragged_rows_do_not_poison_each_other(config):
    scene = Scene(SHAPE, [40, 70, 9])
    where = [*window_rows(1, 17, 5), (2, 8), *window_rows(0, 35, 3)]
    options = {"runs": runs_of([5, 1, 3]), "config": config}
    clean, _ = run(scene, where, **options)
    for slot, poisoned in ((1, 15), (2, 3), (0, 35)):
        scene.kv.values[scene.table[slot, poisoned // 16], :, poisoned % 16] = torch.nan
    got, _ = run(scene, where, **options)
    for row, (slot, position) in enumerate(where):
        if position >= (35, 15, 3)[slot]:
            assert got[row].isnan().all()
        else:
            assert_close(got[row], clean[row].double())


def test_half_precision_and_great_scores():
    scene = Scene(SHAPE, [48], dtype=torch.float16)
    scene.kv.keys.mul_(30)
    scene.keys = [keys * 30 for keys in scene.keys]
    assert_close(*run(scene, window_rows(0, 47, 4), window=4, config=SPLIT_KV), tolerance=2e-3)


def test_max_seq_len_bounds_the_launch_not_the_result():
    scene = Scene(SHAPE, [90])
    where = [(0, 40), (0, 41)]
    bounded, expected = run(scene, where, window=1, max_seq_len=42, config=SPLIT_KV)
    assert_close(bounded, expected)


def test_chosen_form_follows_the_shapes_alone():
    shape = AttentionShape(32, 8, 128)
    bf16 = torch.bfloat16
    assert choose(1, 1, shape, 4096, bf16).form == "split_kv"
    assert choose(1, 1, shape, 4096, bf16).block_queries == 16
    assert choose(1, 1, shape, 128, bf16).form == "sequential"
    assert choose(128, 1, shape, 4096, bf16).form == "sequential"
    assert choose(1, 512, shape, 4096, bf16).form == "sequential"
    assert choose(1, 512, shape, 4096, bf16).block_queries == 64
    assert choose(1, 512, shape, 4096, torch.float32).block_queries == 16
    assert choose(1, 6, shape, 4096, bf16).block_queries == 32
    for window in (1, 4, 6):
        assert choose(8, window, shape, 4096, bf16).form == "split_kv"
        assert choose(64, window, shape, 4096, bf16).form == "sequential"
    assert choose(1, 4, AttentionShape(48, 1, 64), 64, bf16).block_queries >= 48
    assert choose(16, 4, shape, 4096, bf16).form == "split_kv"
    assert choose(16, 4, shape, 81920, bf16).form == "sequential"


def test_heavy_heads_keep_the_chip_busy_with_fewer_programs():
    shape = AttentionShape(16, 4, 256)
    for window in (1, 4):
        assert choose(16, window, shape, 4096, torch.bfloat16).form == "split_kv"
        assert choose(64, window, shape, 4096, torch.bfloat16).form == "sequential"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256, 320, 512])
def test_chosen_launches_over_heads_of_a_size_share_what_their_bits_follow_from(head_dim, dtype):
    shape = AttentionShape(16, 4, head_dim)
    found = {
        (config.split, config.tile)
        for width in (1, 3, 4, 8, 16, 512)
        for batch in (1, 8, 64)
        for config in [choose(batch, width, shape, 4096, dtype)]
    }
    assert len(found) == 1


def test_impossible_launches_are_refused():
    scene = Scene(SHAPE, [20])
    q, rows = scene.rows([(0, 3)])
    with pytest.raises(InvariantError, match=r"Set AttentionRows\.runs"):
        attention(q, SHAPE, rows, scene.kv)
    with pytest.raises(InvariantError, match="2 runs of 2"):
        run(scene, window_rows(0, 5, 3), runs=RowRuns.even(2, 2), config=SEQUENTIAL)


def test_no_rows_give_no_rows():
    scene = Scene(SHAPE, [20])
    q, rows = scene.rows([(0, 3)])
    nothing = AttentionRows(rows.positions[:0], rows.slots[:0], rows.kv_slots[:0], scene.table)
    for runs in (RowRuns.even(0, 4), runs_of([]), runs_of([0, 0])):
        at = replace(nothing, runs=runs)
        assert attention(q[:0], SHAPE, at, scene.kv).shape == (0, 64)


def test_partial_results_that_no_program_wrote_are_not_read(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor, *size, **options):
        made = new_empty(tensor, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    scene = Scene(SHAPE, [100, 40])
    where = window_rows(0, 97, 5) + window_rows(1, 12, 5)
    for programs in (1, 8, 1000):
        config = replace(SPLIT_KV, programs=programs)
        assert_close(*run(scene, where, window=5, config=config))


@pytest.mark.parametrize("capability", [75, 89, 90])
def test_every_chosen_launch_compiles_for_a_gpu(tmp_path, capability):
    """Short windows, many rows, long chunks; few rows in test_pdl.py. Of small GPUs the largest.

    In fp32, without tensor cores, all have the launches of the GPU with less memory.
    """
    code = """
from sametoken.ops.model.attention import triton
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RowRuns

table = torch.zeros(64, 32, dtype=torch.int64)
narrow, wide = AttentionShape(32, 8, 128), AttentionShape(16, 4, 256, sliding_window=100)
gemma, half, full = AttentionShape(32, 4, 512), torch.bfloat16, torch.float32
EVEN, RAGGED = True, False
triton.shared_memory = lambda q: memory
least = [(narrow, half, 2, 512, RAGGED), (wide, half, 2, 512, RAGGED)]
most = (gemma, half, 2, 512, RAGGED)
in_fp32 = [(gemma, full, 24, 512, RAGGED), (wide, full, 1, 1, RAGGED)]
others = [
    *((narrow, half, 1, 16, RAGGED), (narrow, half, 64, 4, EVEN), (narrow, half, 2, 512, RAGGED)),
    *((wide, half, 2, 512, RAGGED), (narrow, half, 24, 512, RAGGED), (gemma, half, 1, 1, RAGGED)),
]
cases = {64 << 10: least, 99 << 10: [most, *in_fp32]}.get(memory, [most, *others])
for shape, dtype, batch, width, is_even in cases:
    kv = torch.zeros(2, 2, shape.num_kv_heads, 64, shape.head_dim, dtype=dtype)
    at = torch.zeros(batch * width, dtype=torch.int64)
    q = torch.empty(len(at), shape.num_heads, shape.head_dim, dtype=dtype)
    ragged = RowRuns(batch, width, torch.arange(batch + 1), 0, 0)
    runs = RowRuns.even(batch, width) if is_even else ragged
    triton.attention(q, shape, AttentionRows(at, at, at, table, runs), LayerKV(kv[0], kv[1]))
"""
    compile_launches(code, tmp_path, capability)

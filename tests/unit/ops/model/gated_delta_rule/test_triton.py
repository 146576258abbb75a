"""Gated DeltaNet's kernels: the reference's rows, and the same bits in every window and batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.recurrent import Slots, begin_as_on_a_gpu, params_of
from helpers.rows import runs_of
from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule import triton as triton_rule
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.gated_delta_rule.triton import RuleTile, advance
from sametoken.ops.model.recurrent.convolution_triton import parts_of
from sametoken.ops.model.recurrent.keep import num_keepers
from sametoken.ops.model.recurrent.layout import slot_rows
from sametoken.ops.model.recurrent.rule import STATE_STRIDE, Folded, RawRows
from sametoken.ops.model.recurrent.runs import plan_runs
from sametoken.ops.model.recurrent.triton import TritonPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 3
GARBAGE = 10**15


def spec_of(heads=(1, 2), sizes=(3, 5), taps=4, dtype=torch.float32) -> Recurrent:
    return Recurrent(GatedDelta(*heads, *sizes, taps), dtype)


def empty(
    spec: Recurrent, num_drafts: int, begin_pass=TritonPass.begin, state_stride=STATE_STRIDE
) -> Slots:
    return Slots(spec, num_drafts, begin_pass=begin_pass, device=DEVICE, state_stride=state_stride)


@dataclass(frozen=True)
class Row:
    slot: int
    position: int
    token: int
    committed: bool


def inputs_of(rows: list[Row | None], spec: Recurrent) -> tuple[torch.Tensor, ...]:
    """Raw rows as parts of a wider projection; those of dead rows are NaN."""
    heads, channels = spec.rule.num_value_heads, spec.rule.conv_channels
    width = channels + 2 * heads + 3
    raw = torch.full((len(rows), width), float("nan"))
    for place, row in enumerate(rows):
        if row is not None:
            generator = torch.Generator().manual_seed(row.token)
            raw[place] = torch.randn(width, generator=generator)
    raw = raw.to(DEVICE, spec.dtype)
    qkv, _, a, b = raw.split((channels, 3, heads, heads), dim=-1)
    return qkv, a, b


def attention_rows(rows: list[Row | None], runs: RowRuns) -> AttentionRows:
    facts = [(r.slot, r.position, r.committed) if r else (SLOTS, 0, False) for r in rows]
    slots, positions, committed = torch.tensor(facts, device=DEVICE).t().contiguous().unbind(0)
    return AttentionRows(positions, slots, slots, slots[None], runs, committed.bool())


def run(
    cache: Slots, groups: list[list[Row]], window: int | None = None, num_short: int = 0
) -> list:
    """One pass over each slot's rows, and then a dead run.

    Either all are padded to ``window`` with dead rows; or runs are ragged, a dead row at the
    end of some, an empty run and rows that have no run behind them.
    """
    if window is not None:
        padded = [[*g, *[None] * (window - len(g))] for g in [*groups, []]]
        runs, behind = RowRuns.even(len(padded), window), 0
    else:
        padded = [[*g, *[None] * (i % 2)] for i, g in enumerate([*groups, [None]])] + [[]]
        runs, behind = runs_of([*map(len, padded)], num_short, DEVICE), 2
    rows = [*(row for run in padded for row in run), *[None] * behind]
    running = cache.begin(attention_rows(rows, runs))
    out = cache.run(
        running, 0, params_of(cache.declared, device=DEVICE), *inputs_of(rows, cache.declared)
    )
    running.finish()
    parts, at = [], 0
    for run_rows, group in zip_longest(padded, groups, fillvalue=[]):
        parts.append(out[at : at + len(group)])
        at += len(run_rows)
        if isinstance(running, TritonPass):
            assert not out[at - len(run_rows) + len(group) : at].any()
    return parts[: len(groups)]


@dataclass
class Slot:
    """A sequence, and the same one run plainly: one committed row per pass."""

    index: int
    spec: Recurrent
    plain: Slots
    tokens: list[int] = field(default_factory=list)

    def rows(self, committed: list[int], drafts: list[int]) -> list[Row]:
        first = len(self.tokens)
        return [
            Row(self.index, first + i, token, i < len(committed))
            for i, token in enumerate([*committed, *drafts])
        ]

    def check(self, rows: list[Row], out: torch.Tensor, num_accepted: int) -> None:
        num_kept = sum(row.committed for row in rows) + num_accepted
        for place, row in enumerate(rows[:num_kept]):
            (alone,) = run(self.plain, [[replace(row, committed=True)]])
            assert torch.equal(out[place], alone[0])
        self.tokens += [row.token for row in rows[:num_kept]]


part = st.fixed_dictionaries(
    {
        "slot": st.integers(0, SLOTS - 1),
        "reuse": st.sampled_from([False, False, True]),
        "num_committed": st.sampled_from([1, 1, 2, 4]),
        "num_drafts": st.integers(0, 3),
        "num_accepted": st.integers(0, 3),
        "seed": st.integers(0, 2**20),
    }
)
steps = st.lists(
    st.tuples(st.booleans(), st.lists(part, min_size=1, max_size=2)), min_size=2, max_size=4
)
SPECS = [
    spec_of(),
    spec_of(heads=(2, 4), sizes=(24, 4), taps=2),
    spec_of(heads=(2, 2), sizes=(5, 16), taps=3, dtype=torch.bfloat16),
    spec_of(heads=(1, 1), sizes=(4, 4), taps=1),
]


@given(spec=st.sampled_from(SPECS), steps=steps, stride=st.sampled_from([1, STATE_STRIDE]))
@settings(max_examples=4)
def test_every_row_is_that_of_plain_rows_and_of_the_reference(spec, steps, stride):
    cache = empty(spec, 3, state_stride=stride)
    oracle = empty(spec, 3, begin_as_on_a_gpu, stride)
    slots: dict[int, Slot] = {}
    for padded, step in steps:
        parts, groups = [], []
        for one in {one["slot"]: one for one in step}.values():
            if one["reuse"] or one["slot"] not in slots:
                slots[one["slot"]] = Slot(one["slot"], spec, empty(spec, 0))
            tokens = torch.Generator().manual_seed(one["seed"])
            tokens = torch.randint(0, 31, (7,), generator=tokens).tolist()
            drafts = tokens[4 : 4 + one["num_drafts"]]
            groups.append(slots[one["slot"]].rows(tokens[: one["num_committed"]], drafts))
            parts.append((slots[one["slot"]], min(one["num_accepted"], len(drafts))))
        outs = run(cache, groups, 8 if padded else None, num_short=1)
        expected = run(oracle, groups)
        for (slot, accepted), group, out, wanted in zip(parts, groups, outs, expected, strict=True):
            close(out, wanted)
            slot.check(group, out, accepted)
        compare(cache, oracle, list(slots))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    exact = actual.dtype == torch.float32
    torch.testing.assert_close(
        actual, expected, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 1e-2
    )


def compare(cache: Slots, oracle: Slots, slots: list[int]) -> None:
    """Counts and raw rows are equal, states are close; slots that nobody ran are untouched."""
    assert torch.equal(cache.position, oracle.position)
    assert torch.equal(cache.num_pending, oracle.num_pending)
    for slot in range(SLOTS + 1):
        if slot not in slots:
            assert cache.states[:, slot].isnan().all()
            continue
        # Before a state is stored, a slot has none.
        if cache.position[slot]:
            close(cache.states[:, slot], oracle.states[:, slot])
        pending = slice(0, int(oracle.num_pending[slot]))
        for held, wanted in (
            (cache.history[:, slot], oracle.history[:, slot]),
            (cache.pending_mixed[:, slot, pending], oracle.pending_mixed[:, slot, pending]),
            (cache.pending_gates[:, slot, pending], oracle.pending_gates[:, slot, pending]),
        ):
            assert torch.equal(held, wanted)


@pytest.mark.parametrize("window", [None, 9])
def test_chunks_of_a_prompt_leave_what_one_row_at_a_time_leaves(window):
    spec = spec_of(heads=(1, 2), sizes=(24, 8))
    rows = [Row(1, p, 7 * p % 31, True) for p in range(8)]
    whole, chunks, single = empty(spec, 2), empty(spec, 2), empty(spec, 0)
    (expected,) = run(whole, [rows], window)
    for lengths, cache in (((1, 4, 2, 1), chunks), ((1,) * 8, single)):
        first, out = 0, []
        for length in lengths:
            out += run(cache, [rows[first : first + length]], window)
            first += length
        assert torch.equal(torch.cat(out), expected)
        assert torch.equal(cache.states[:, 1], whole.states[:, 1])
        assert torch.equal(cache.history[:, 1], whole.history[:, 1])


def test_ragged_runs_have_the_bits_of_runs_alone():
    spec, groups = spec_of(), []
    for slot, length in ((2, 1), (0, 17), (1, 70)):
        groups.append([Row(slot, p, 7 * p + slot, True) for p in range(length)])
    cache = empty(spec, 2)
    for group, out in zip(groups, run(cache, groups, num_short=2), strict=True):
        alone, slot = empty(spec, 2), group[0].slot
        (expected,) = run(alone, [group], len(group))
        assert torch.equal(out, expected)
        held, wanted = cache.states[:, slot], alone.states[:, slot]
        assert held.isnan().any() == (len(group) < STATE_STRIDE)
        assert torch.equal(held.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(cache.history[:, slot], alone.history[:, slot])
    assert cache.states[:, SLOTS].isnan().all()
    assert cache.history[:, SLOTS].isnan().all()


def test_rows_of_a_chain_run_on_pending_rows_and_fold_nothing():
    """A draft model's own drafts, also of a slot in which nothing is folded yet."""
    spec = SPECS[0]
    for num_committed in (0, 7):
        cache, plain = empty(spec, 6), empty(spec, 0)
        start = [Row(0, p, p, p < num_committed) for p in range(num_committed + 1)]
        out = run(cache, [start])
        for p in range(num_committed + 1, num_committed + 4):
            out += run(cache, [[Row(0, p, p, False)]], window=1)
        assert cache.position[0] == num_committed // STATE_STRIDE * STATE_STRIDE
        assert cache.num_pending[0] == num_committed % STATE_STRIDE + 4
        again = [Row(0, num_committed, num_committed, True), Row(0, num_committed + 1, 20, True)]
        out = torch.cat(out)
        true = [run(plain, [[Row(0, p, p, True)]])[0] for p in range(num_committed + 4)]
        assert torch.equal(out, torch.cat(true))
        (again,) = run(cache, [again])
        other = empty(spec, 0)
        true = [run(other, [[Row(0, p, p, True)]])[0] for p in range(num_committed + 1)]
        true += run(other, [[Row(0, num_committed + 1, 20, True)]])
        assert torch.equal(again, torch.cat(true)[num_committed:])
        assert torch.equal(cache.states[:, 0].nan_to_num(), other.states[:, 0].nan_to_num())


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([Row(0, 10, 1, True)], id="beyond what is pending"),
        pytest.param([Row(0, 3, 1, True)], id="below what is folded"),
        pytest.param([Row(0, 5, 1, False), Row(0, 6, 1, True)], id="committed after a draft"),
        pytest.param([Row(0, 5 + i, 1, i == 0) for i in range(7)], id="more drafts than fit"),
        pytest.param([Row(1, 5, 1, True)], id="a slot that nobody began"),
    ],
)
def test_rows_that_do_not_follow_give_nan_and_change_nothing(rows):
    spec = SPECS[0]
    cache = empty(spec, 4)
    run(cache, [[Row(0, p, p, p < 5) for p in range(9)]])
    names = ("states", "history", "pending_mixed", "pending_gates", "position", "num_pending")
    before = {name: getattr(cache, name).clone() for name in names}
    neighbour = [Row(2, 0, 5, True)]
    out, beside = run(cache, [rows, neighbour])
    assert out.isnan().all()
    assert torch.equal(beside, run(empty(spec, 0), [neighbour])[0])
    for name, value in before.items():
        slot_axis = 0 if value.dim() == 1 else 1
        held, kept = (t.select(slot_axis, rows[0].slot) for t in (getattr(cache, name), value))
        assert torch.equal(held.nan_to_num(7.0), kept.nan_to_num(7.0))


def test_rows_without_runs_are_refused():
    cache, rows = empty(SPECS[0], 0), attention_rows([Row(0, 0, 1, True)], RowRuns.even(1, 1))
    with pytest.raises(InvariantError, match=r"Set AttentionRows\.runs"):
        cache.begin(replace(rows, runs=None))


def test_rows_behind_all_runs_change_nothing():
    spec = SPECS[0]
    cache = empty(spec, 2)
    for runs in (RowRuns.even(0, 1), runs_of([0, 0], 1, DEVICE)):
        running = cache.begin(attention_rows([None] * 3, runs))
        out = cache.run(running, 0, params_of(spec, device=DEVICE), *inputs_of([None] * 3, spec))
        assert out.shape == (3, spec.rule.out_features)
    assert not cache.position.any()
    assert cache.states.isnan().all()


@settings(max_examples=12)
@given(data=st.data())
def test_runs_are_those_of_the_reference(data):
    stride = data.draw(st.sampled_from([1, STATE_STRIDE]))
    max_pending = 3 + stride - 1
    stored = [data.draw(st.integers(0, 2)) for _ in range(SLOTS)]
    position = torch.tensor([*stored, 0]) * STATE_STRIDE
    pending = torch.tensor([data.draw(st.integers(0, max_pending)) for _ in range(SLOTS)] + [0])
    rows, lengths, order = [], [], data.draw(st.permutations(range(SLOTS)))
    for slot in order[: data.draw(st.integers(1, SLOTS))]:
        folded = data.draw(st.integers(0, int(pending[slot])))
        first = 0 if data.draw(st.booleans()) else int(position[slot]) + folded
        drafts = data.draw(st.integers(0, 3))
        count = data.draw(st.integers(1, 5))
        rows += [Row(slot, first + i, 0, i < count) for i in range(count + drafts)]
        lengths.append(count + drafts)
    at = attention_rows(rows, runs_of(lengths, device=DEVICE))
    expected = slot_rows(
        replace(at, **{name: getattr(at, name).cpu() for name in ("slots", "positions")},
                committed=at.committed.cpu()),
        Folded(position, pending, max_pending, stride),
        stride,
    )  # fmt: skip
    new_position, new_pending = position.clone().to(DEVICE), pending.clone().to(DEVICE)
    table = plan_runs(at, Folded(new_position, new_pending, max_pending, stride)).table.tolist()
    for run_of, wanted in zip(table, expected, strict=True):
        first, stop = wanted.first_row, wanted.first_row + wanted.num_rows
        before = 0 if wanted.starts else int(position[wanted.slot])
        counts = [wanted.num_rows, wanted.num_folded, wanted.num_lasting]
        assert run_of == [wanted.slot, first, stop, *counts, before == 0, 0]
        assert new_position[wanted.slot] == before + wanted.num_lasting
        assert new_pending[wanted.slot] == wanted.num_pending


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_a_tile_changes_no_bit(columns):
    """Four keys: of more, numpy adds in an order of its own."""
    spec = spec_of(heads=(1, 2), sizes=(4, 15))
    rows = [Row(0, p, p, p < 4) for p in range(6)]
    found = []
    for tile in (RuleTile(32, 2, 4), RuleTile(columns, 4, 8)):
        cache = empty(spec, 2)
        at = attention_rows(rows, RowRuns.even(1, 6))
        mixed, *gates = inputs_of(rows, spec)
        runs, raw = plan_runs(at, cache.folded), RawRows(mixed, tuple(gates))
        found.append(advance(runs, params_of(spec, device=DEVICE), raw, cache.layer(0), tile))
    assert torch.equal(*found)


@pytest.mark.parametrize("lengths", [[5, 9], [14]])
def test_runs_without_rows_change_no_bit(lengths):
    """Padded steps have many; then programs look for the run whose rows they prepare."""
    spec, found = spec_of(heads=(2, 2), sizes=(4, 4)), []
    rows = [Row(slot, p, p, True) for slot, n in enumerate(lengths) for p in range(n)]
    for padding in (0, 12):
        starts = torch.tensor([0, *accumulate(lengths)] + padding * [len(rows)], device=DEVICE)
        cut = RowRuns(len(lengths) + padding, max(lengths), starts, 0, 0)
        cache = empty(spec, 0)
        parts = parts_of(cut.groups[0], len(rows), cache.layer(0), 3)
        assert (parts.each > 0) == (padding > 0)
        mixed, *gates = inputs_of(rows, spec)
        runs = plan_runs(attention_rows(rows, cut), cache.folded)
        raw = RawRows(mixed, tuple(gates))
        found.append(advance(runs, params_of(spec, device=DEVICE), raw, cache.layer(0)))
    assert torch.equal(*found)


@pytest.mark.parametrize(("batch", "keepers"), [(1, 8), (7, 8), (8, 2), (9, 8), (64, 8)])
def test_programs_that_keep_raw_rows_fit_beside_states_that_fit(batch, keepers):
    """Heads of Qwen3.5-9B: 64 programs of two warps a run; the chip holds 528."""
    assert num_keepers(64, batch, 2, 8192, long=False) == keepers
    assert (64 * batch > 528) or (64 + keepers) * batch <= 528


@pytest.mark.parametrize(("batch", "keepers"), [(1, 8), (2, 2), (4, 2), (8, 2), (33, 8)])
def test_beside_long_runs_no_multiprocessor_has_a_program_more(batch, keepers):
    assert num_keepers(64, batch, 2, 8192, long=True) == keepers
    rounds = -(-64 * batch // 132)
    assert (64 * batch % 132 == 0) or (64 + keepers) * batch <= 132 * rounds


@pytest.mark.parametrize("prompt", [1, 127, 128])
def test_long_runs_alone_start_behind_their_preparation(prompt, monkeypatch):
    asked = []

    def pdl_options(tensor, early=True):
        asked.append(early)
        return {"PDL": False}

    monkeypatch.setattr(triton_rule, "pdl_options", pdl_options)
    run(empty(spec_of(), 0), [[Row(0, p, p, True) for p in range(prompt)]], prompt)
    assert asked == [prompt < 128]

"""Kernels of both rules: the reference's rows, and the same bits in every window and batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.recurrent import Slots, begin_as_on_a_gpu, params_of
from helpers.recurrent_rows import DEVICE, SLOTS, Row, attention_rows, empty, inputs_of, run
from helpers.rows import runs_of
from sametoken.errors import InvariantError
from sametoken.ops.backend import RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent.convolution_triton import parts_of
from sametoken.ops.model.recurrent.keep import num_keepers
from sametoken.ops.model.recurrent.layout import slot_rows
from sametoken.ops.model.recurrent.rule import STATE_STRIDE, Folded
from sametoken.ops.model.recurrent.runs import plan_runs

SPECS = [
    Recurrent(GatedDelta(1, 2, 3, 5, 4), torch.float32),
    Recurrent(GatedDelta(2, 4, 24, 4, 2), torch.float32),
    Recurrent(GatedDelta(2, 2, 5, 16, 3), torch.bfloat16),
    Recurrent(GatedDelta(1, 1, 4, 4, 1), torch.float32),
    Recurrent(Mamba2(2, 3, 1, 5, 4), torch.float32),
    Recurrent(Mamba2(4, 8, 2, 4, 2), torch.float32),
    Recurrent(Mamba2(3, 5, 3, 16, 3), torch.bfloat16),
    Recurrent(Mamba2(1, 4, 1, 4, 1), torch.float32),
]


def of_either_rule(*rules):
    specs = [Recurrent(rule, torch.float32) for rule in rules]
    return pytest.mark.parametrize("spec", specs, ids=["gated delta", "mamba2"])


either_rule = of_either_rule(SPECS[0].rule, SPECS[4].rule)


@dataclass
class Slot:
    """A sequence, and the same one run plainly: one committed row per pass."""

    index: int
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


class Part(NamedTuple):
    """Of a step, a slot's."""

    slot: int
    num_committed: int
    num_drafts: int = 0
    num_accepted: int = 0
    seed: int = 0
    reuse: bool = False


part = st.builds(
    Part,
    slot=st.integers(0, SLOTS - 1),
    num_committed=st.sampled_from([1, 1, 2, 4]),
    num_drafts=st.integers(0, 3),
    num_accepted=st.integers(0, 3),
    seed=st.integers(0, 2**20),
    reuse=st.sampled_from([False, False, True]),
)
steps = st.lists(
    st.tuples(st.booleans(), st.lists(part, min_size=1, max_size=2)), min_size=2, max_size=4
)
#: Prompts with drafts behind, windows that fold some or none of them, a step without.
STEPS = [
    (False, [Part(2, 3, 2, 2, seed=1), Part(0, 1, 3, 1, seed=2)]),
    (True, [Part(0, 1, 3, seed=3), Part(2, 1, seed=4)]),
    (False, [Part(0, 2, 1, 1, seed=5)]),
    (True, [Part(2, 1, 3, seed=6), Part(0, 1, seed=7)]),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.rule.state_shape))
@example(steps=STEPS, stride=STATE_STRIDE)
@example(steps=STEPS, stride=1)
@given(steps=steps, stride=st.sampled_from([1, STATE_STRIDE]))
@settings(max_examples=2)
def test_every_row_is_that_of_plain_rows_and_of_the_reference(spec, steps, stride):
    cache = empty(spec, 3, state_stride=stride)
    oracle = empty(spec, 3, begin_as_on_a_gpu, stride)
    slots: dict[int, Slot] = {}
    for padded, step in steps:
        parts, groups = [], []
        for one in {one.slot: one for one in step}.values():
            if one.reuse or one.slot not in slots:
                slots[one.slot] = Slot(one.slot, empty(spec, 0))
            tokens = torch.Generator().manual_seed(one.seed)
            tokens = torch.randint(0, 31, (7,), generator=tokens).tolist()
            drafts = tokens[4 : 4 + one.num_drafts]
            groups.append(slots[one.slot].rows(tokens[: one.num_committed], drafts))
            parts.append((slots[one.slot], min(one.num_accepted, len(drafts))))
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


@of_either_rule(GatedDelta(1, 2, 24, 8, 4), Mamba2(2, 8, 2, 8, 4))
@pytest.mark.parametrize("window", [None, 9])
def test_chunks_of_a_prompt_leave_what_one_row_at_a_time_leaves(window, spec):
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


@either_rule
def test_ragged_runs_have_the_bits_of_runs_alone(spec):
    groups = []
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


@either_rule
def test_rows_of_a_chain_run_on_pending_rows_and_fold_nothing(spec):
    """A draft model's own drafts, also of a slot in which nothing is folded yet."""
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


@either_rule
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
def test_rows_that_do_not_follow_give_nan_and_change_nothing(rows, spec):
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


@either_rule
def test_rows_behind_all_runs_change_nothing(spec):
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


@of_either_rule(GatedDelta(2, 2, 4, 4, 4), Mamba2(2, 4, 2, 4, 4))
@pytest.mark.parametrize("lengths", [[5, 9], [14]])
def test_runs_without_rows_change_no_bit(lengths, spec):
    """Padded steps have many; then programs look for the run whose rows they prepare."""
    found = []
    rows = [Row(slot, p, p, True) for slot, n in enumerate(lengths) for p in range(n)]
    for padding in (0, 12):
        starts = torch.tensor([0, *accumulate(lengths)] + padding * [len(rows)], device=DEVICE)
        cut = RowRuns(len(lengths) + padding, max(lengths), starts, 0, 0)
        cache = empty(spec, 0)
        parts = parts_of(cut.groups[0], len(rows), cache.layer(0), 3)
        assert (parts.each > 0) == (padding > 0)
        running = cache.begin(attention_rows(rows, cut))
        params = params_of(spec, device=DEVICE)
        found.append(cache.run(running, 0, params, *inputs_of(rows, spec)))
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

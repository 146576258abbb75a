"""Whatever is drafted, accepted and mixed, the bits are those of committed rows run one by one.

Two oracles: the committed tokens alone, one row per pass; and columns, one state per window
position, of which the accepted one is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.decaying_sum import DecayingSum, DecayingSumWeights
from helpers.recurrent import Slots, params_of
from helpers.recurrent_rows import Row
from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows, FastPrompts, Kernels
from sametoken.ops.cache_types import Recurrent, bytes_per_slot, state_bytes
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent.rule import FAST_ROWS, STATE_STRIDE
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

NUM_SLOTS = 3
NAN_TOKEN = -1
RULE = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_kernel=4)

SCAN = Mamba2(num_heads=4, head_dim=3, num_groups=2, state_dim=5, conv_kernel=4)
RULES = (RULE, SCAN)
LIMITS = ((0.0, float("inf")), (0.01, 3.0))
NUM_LAYERS = len(LIMITS)


PARAMS = {
    rule: [
        params_of(Recurrent(rule, torch.float32), layer=layer, bias=layer > 0, limit=limit)
        for layer, limit in enumerate(LIMITS)
    ]
    for rule in RULES
}


def inputs_of(rule, layer: int, token: int) -> torch.Tensor:
    """[C + G] raw projections of a token: any function of it will do."""
    width = rule.conv_channels + sum(rule.gate_sizes)
    if token == NAN_TOKEN:
        return torch.full((width,), float("nan"))
    generator = torch.Generator().manual_seed(1000 * layer + token)
    return torch.randn(width, generator=generator)


def attention_rows(rows: list[Row]) -> AttentionRows:
    positions = torch.tensor([row.position for row in rows])
    return AttentionRows(
        positions,
        torch.tensor([row.slot for row in rows]),
        positions,
        positions[None],
        committed=torch.tensor([row.committed for row in rows]),
    )


def run(cache: Slots, rows: list[Row], first_fast: int | None = None) -> torch.Tensor:
    """One pass: [L, T, out_features]; rows from ``first_fast`` on are in the fast form."""
    given = attention_rows(rows)
    if first_fast is not None:
        prompt_len = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64)
        prompt_len[given.slots[first_fast:]] = 2**20
        given = replace(given, fast_prompts=FastPrompts(prompt_len, 1))
    running = cache.begin(given)
    out, rule = [], cache.rule
    for layer, params in enumerate(PARAMS[rule]):
        raw = torch.stack([inputs_of(rule, layer, row.token) for row in rows])
        parts = raw.split((rule.conv_channels, *rule.gate_sizes), dim=-1)
        out.append(cache.run(running, layer, params, *parts))
    running.finish()
    return torch.stack(out)


def empty(
    num_drafts: int, kernels: Kernels, dtype: torch.dtype = torch.float32, rule=RULE
) -> Slots:
    declared = Recurrent(rule, dtype)
    return Slots(
        declared,
        num_drafts,
        num_slots=NUM_SLOTS,
        num_layers=NUM_LAYERS,
        begin_pass=kernels.begin_pass,
    )


def plain_like(cache: Slots) -> Slots:
    """For committed rows alone, run by the same pass."""
    return Slots(
        cache.declared, 0, num_slots=NUM_SLOTS, num_layers=NUM_LAYERS, begin_pass=cache.begin_pass
    )


@dataclass
class Columns:
    """The simple way: every row leaves a state of its own, and one of them is gone on from."""

    column: Slots

    def copy(self) -> Columns:
        one = plain_like(self.column)
        for name in ("states", "history", "position", "num_pending"):
            getattr(one, name).copy_(getattr(self.column, name))
        return Columns(one)

    def window(self, rows: list[Row]) -> tuple[list[torch.Tensor], list[Columns]]:
        """Outputs and states after each row."""
        out, states, last = [], [], self
        for row in rows:
            last = last.copy()
            out.append(run(last.column, [Row(row.slot, row.position, row.token, True)])[:, 0])
            states.append(last)
        return out, states


@dataclass
class Slot:
    """A sequence in a slot, and what both oracles make of it."""

    index: int
    plain: Slots
    columns: Columns
    tokens: list[int] = field(default_factory=list)

    def rows(self, num_committed: int, drafts: list[int], new_tokens: list[int]) -> list[Row]:
        """Rows at the end of the sequence; the committed ones bring ``new_tokens``."""
        first = len(self.tokens)
        tokens = [*new_tokens[:num_committed], *drafts]
        return [
            Row(self.index, first + i, token, i < num_committed) for i, token in enumerate(tokens)
        ]

    def check(self, rows: list[Row], out: torch.Tensor, num_accepted: int) -> None:
        expected, states = self.columns.window(rows)
        assert torch.equal(out, torch.stack(expected, dim=1))
        num_kept = sum(row.committed for row in rows) + num_accepted
        for row in range(num_kept):
            true = Row(self.index, rows[row].position, rows[row].token, True)
            assert torch.equal(run(self.plain, [true])[:, 0], out[:, row])
        self.columns = states[num_kept - 1]
        self.tokens += [row.token for row in rows[:num_kept]]

    def check_folded(self, cache: Slots) -> None:
        """A step without drafts folds all; then the states are the oracles'."""
        for oracle in (self.plain, self.columns.column):
            assert torch.equal(cache.states[:, self.index], oracle.states[:, self.index])
            assert torch.equal(cache.history[:, self.index], oracle.history[:, self.index])


token = st.integers(0, 30)
part = st.fixed_dictionaries(
    {
        "slot": st.integers(0, NUM_SLOTS - 1),
        "reuse": st.sampled_from([False, False, False, True]),
        "num_committed": st.sampled_from([1, 1, 1, 2, 5]),
        "num_drafts": st.sampled_from(["none", "one", "some", "all"]),
        "accepted": st.floats(0, 1),
        "seed": st.integers(0, 2**20),
    }
)
steps = st.lists(st.lists(part, min_size=1, max_size=3), min_size=1, max_size=8)


def play(cache: Slots, num_drafts: int, slots: dict[int, Slot], step: list[dict]) -> None:
    rows, parts = [], []
    for one in {one["slot"]: one for one in step}.values():
        if one["reuse"] or one["slot"] not in slots:
            plain, columns = plain_like(cache), Columns(plain_like(cache))
            slots[one["slot"]] = Slot(one["slot"], plain, columns)
        generator = torch.Generator().manual_seed(one["seed"])
        counts = {"none": 0, "one": 1, "some": (num_drafts + 1) // 2, "all": num_drafts}
        width = min(counts[one["num_drafts"]], num_drafts)
        tokens = torch.randint(0, 31, (5 + width,), generator=generator).tolist()
        slot = slots[one["slot"]]
        own = slot.rows(one["num_committed"], tokens[5:], tokens[:5])
        parts.append((slot, own, round(one["accepted"] * width)))
        rows += own
    outs = run(cache, rows).split([len(own) for _, own, _ in parts], dim=1)
    for (slot, own, accepted), out in zip(parts, outs, strict=True):
        slot.check(own, out, accepted)


both_passes = pytest.mark.parametrize(
    "kernels", [ReferenceKernels(), NativeKernels()], ids=["row by row", "native"]
)
both_rules = pytest.mark.parametrize("rule", RULES, ids=["gated delta", "mamba2"])


@both_passes
@both_rules
@given(num_drafts=st.sampled_from([0, 1, 3, 7]), steps=steps)
@settings(max_examples=8)
def test_every_row_and_state_is_that_of_plain_rows_and_of_columns(rule, kernels, num_drafts, steps):
    cache, slots = empty(num_drafts, kernels, rule=rule), {}
    for step in steps:
        play(cache, num_drafts, slots, step)
    for slot in slots.values():
        end = {"slot": slot.index, "reuse": False, "num_committed": 1, "seed": 7}
        play(cache, num_drafts, slots, [{**end, "num_drafts": "none", "accepted": 0.0}])
        slot.check_folded(cache)


@both_passes
@both_rules
@pytest.mark.parametrize("accepted", [0.0, 0.3, 1.0])
def test_a_window_of_64_drafts_and_then_a_step_without_any(rule, kernels, accepted):
    cache, slots = empty(64, kernels, rule=rule), {}
    prompt = {"slot": 1, "reuse": False, "num_committed": 5, "accepted": accepted, "seed": 1}
    play(cache, 64, slots, [{**prompt, "num_drafts": "none"}])
    for seed in (2, 3):
        window = {**prompt, "num_committed": 1, "seed": seed}
        play(cache, 64, slots, [{**window, "num_drafts": "all"}])
    assert cache.num_pending[1] == 64
    play(cache, 64, slots, [{**window, "num_drafts": "none"}])
    assert cache.num_pending[1] == 0
    assert cache.position[1] == len(slots[1].tokens)
    slots[1].check_folded(cache)


@both_passes
@both_rules
def test_rows_of_a_chain_run_on_pending_rows_and_fold_nothing(rule, kernels):
    """A draft model's own drafts: pass by pass behind a newest token that comes once more."""
    cache, plain = empty(4, kernels, rule=rule), empty(0, kernels, rule=rule)
    committed = [Row(0, p, p, True) for p in range(3)]
    run(cache, [*committed, Row(0, 3, 3, False)])
    folded = cache.states[:, 0].clone()
    chain = [run(cache, [Row(0, p, p, False)])[:, 0] for p in (4, 5, 6)]
    assert torch.equal(cache.states[:, 0], folded)
    assert cache.position[0] == 3
    expected = [run(plain, [Row(0, p, p, True)])[:, 0] for p in range(7)]
    assert all(torch.equal(row, true) for row, true in zip(chain, expected[4:], strict=True))

    again = run(cache, [Row(0, 3, 3, True), Row(0, 4, 20, True)])
    other = empty(0, kernels, rule=rule)
    true = [run(other, [Row(0, p, t, True)])[:, 0] for p, t in enumerate([0, 1, 2, 3, 20])]
    assert torch.equal(again, torch.stack(true[3:], dim=1))
    assert torch.equal(cache.states[:, 0], other.states[:, 0])


@both_passes
@both_rules
def test_dead_rows_may_lie_anywhere(rule, kernels):
    """Rows of the reserved slot, with NaN in what is projected, as static shapes have them."""
    dead, live = Row(NUM_SLOTS, 0, NAN_TOKEN, False), []
    for slot in (2, 0):
        live.append([Row(slot, p, 5 * slot + p, p < 2) for p in range(4)])
    cache, plain = empty(3, kernels, rule=rule), empty(3, kernels, rule=rule)
    expected = run(plain, [*live[0], *live[1]])
    out = run(cache, [dead, *live[0], dead, dead, *live[1], dead])
    assert torch.equal(torch.cat((out[:, 1:5], out[:, 7:11]), dim=1), expected)
    run(cache, [dead, dead])
    for name in ("position", "num_pending"):
        assert torch.equal(getattr(cache, name), getattr(plain, name))
    for name in ("states", "history", "pending_mixed", "pending_gates"):
        held, wanted = getattr(cache, name), getattr(plain, name)
        assert torch.equal(held.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert held[:, NUM_SLOTS].isnan().all()


@both_passes
@both_rules
def test_chunks_have_their_bits_in_every_pass(rule, kernels):
    """Two in one pass beside rows that are walked, or alone."""
    rows = [Row(0, p, p % 9, True) for p in range(2 * FAST_ROWS)]
    beside = [Row(2, p, p, p < 3) for p in range(5)]
    cache, other, usual = (empty(3, kernels, rule=rule) for _ in range(3))
    out = run(cache, [*beside, *rows], 5)
    parts = [run(other, rows[:FAST_ROWS], 0), run(other, rows[FAST_ROWS:], 0)]
    assert torch.equal(out[:, 5:], torch.cat(parts, dim=1))
    assert torch.equal(out[:, :5], run(other, beside))
    for name in ("states", "history", "position", "num_pending"):
        held, wanted = getattr(cache, name), getattr(other, name)
        assert torch.equal(held.nan_to_num(7.0), wanted.nan_to_num(7.0))
    walked = run(usual, rows)
    assert not torch.equal(walked, out[:, 5:])
    torch.testing.assert_close(walked, out[:, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(usual.states[:, 0], cache.states[:, 0], rtol=1e-4, atol=1e-5)


@both_passes
@both_rules
@pytest.mark.parametrize("count", [1, 2, FAST_ROWS - 1])
def test_a_chunk_with_fewer_rows_has_the_bits_of_a_whole_one(count, rule, kernels):
    """Its state is that after its last row, which a whole chunk's rows go on from."""
    rows = [Row(0, p, p % 9, True) for p in range(2 * FAST_ROWS)]
    cache, other = empty(3, kernels, rule=rule), empty(3, kernels, rule=rule)
    out = run(cache, rows, 0)
    assert torch.equal(run(other, rows[: FAST_ROWS + count], 0), out[:, : FAST_ROWS + count])
    rest = run(other, rows[FAST_ROWS + count :])
    torch.testing.assert_close(rest, out[:, FAST_ROWS + count :], rtol=1e-4, atol=1e-5)


@both_passes
@pytest.mark.parametrize("num_rows", [1, FAST_ROWS - 1, FAST_ROWS + 1])
def test_rows_in_the_fast_form_that_begin_inside_of_a_chunk_are_refused(num_rows, kernels):
    cache = empty(3, kernels)
    run(cache, [Row(0, p, p, True) for p in range(num_rows)])
    with pytest.raises(InvariantError, match="no multiple of 64"):
        run(cache, [Row(0, p, p, True) for p in range(num_rows, 2 * FAST_ROWS)], 0)


@both_passes
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([Row(0, 8, 1, True)], id="beyond what is pending"),
        pytest.param([Row(0, 2, 1, True)], id="below what is folded"),
        pytest.param([Row(0, 3, 1, False), Row(0, 4, 1, True)], id="committed after a draft"),
        pytest.param([Row(0, 3 + i, 1, i == 0) for i in range(6)], id="more drafts than fit"),
        pytest.param([Row(1, 5, 1, True)], id="a slot that nobody began"),
    ],
)
def test_rows_that_do_not_follow_are_refused(rows, kernels):
    cache = empty(4, kernels)
    run(cache, [Row(0, p, p, p < 3) for p in range(7)])
    with pytest.raises(InvariantError, match="do not follow"):
        cache.begin(attention_rows(rows))


@both_passes
def test_inputs_that_the_cache_would_round_are_refused(kernels):
    cache = empty(0, kernels, torch.bfloat16)
    running = cache.begin(attention_rows([Row(0, 0, 1, True)]))
    raw = torch.zeros(1, 32)
    with pytest.raises(InvariantError, match="are kept in"):
        cache.run(running, 0, PARAMS[RULE][0], raw, raw[:, :4], raw[:, :4])


@both_passes
def test_another_rule_is_folded_alike_where_a_bundle_has_no_kernel_for_it(kernels):
    """Raw rows of its own, and no convolution: of three drafts one is accepted."""
    rule = DecayingSum(3)
    weights = DecayingSumWeights(rule, torch.tensor([2.0, 0.0, -2.0]))
    cache = Slots(Recurrent(rule, torch.float32), 3, begin_pass=kernels.begin_pass)
    tokens = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))

    def passed(first: int, places: list[int], num_committed: int) -> torch.Tensor:
        rows = [Row(1, first + i, 0, i < num_committed) for i in range(len(places))]
        running = cache.begin(attention_rows(rows))
        out = running.run(weights, weights.raw(tokens[places]), cache.layer(0))
        running.finish()
        return out

    state, run_row, expected = torch.zeros(3), weights.row_function(), []
    for gates in tokens[:6]:
        expected.append(run_row(state, gates[:0], gates))
    found = [passed(0, [0, 1], 2), passed(2, [2, 3, 7, 8], 1)[:2], passed(4, [4, 7], 1)[:1]]
    found.append(passed(5, [5], 1))
    assert torch.equal(torch.cat(found), torch.stack(expected))
    assert torch.equal(cache.states[0, 1], state)
    assert (int(cache.position[1]), int(cache.num_pending[1])) == (6, 0)


@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_slot_are_those_that_are_allocated(dtype, rule):
    slots = empty(5, ReferenceKernels(), dtype, rule)
    caches = (slots.declared,) * NUM_LAYERS
    num_bytes = sum(memory.nbytes for memory in slots.cache.slots)
    assert num_bytes == (NUM_SLOTS + 1) * bytes_per_slot(caches, 5)
    kept = slots.states.nbytes + slots.history.nbytes
    assert kept == (NUM_SLOTS + 1) * state_bytes(caches)
    drafts = bytes_per_slot(caches, 5) - bytes_per_slot(caches, 0)
    raw = rule.conv_channels + sum(rule.gate_sizes)
    assert drafts == NUM_LAYERS * (5 - (STATE_STRIDE - 1)) * raw * dtype.itemsize

"""The C kernels of recurrent rules against rows in PyTorch, and their bits in every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import FIXED
from helpers.recurrent import Slots, params_of
from sametoken.errors import InvariantError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.recurrent import NativePass
from sametoken.ops.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
native, reference = NativeKernels(), ReferenceKernels()

BF16, FP32 = torch.bfloat16, torch.float32
SLOTS = 4
few = settings(FIXED, max_examples=40)
UNLIMITED = (0.0, float("inf"))


def delta_of(groups=2, per_group=2, sizes=(24, 40), taps=4, dtype=FP32) -> Recurrent:
    return Recurrent(GatedDelta(groups, groups * per_group, *sizes, taps), dtype)


def scan_of(groups, per_group, sizes, taps, dtype) -> Recurrent:
    return Recurrent(Mamba2(groups * per_group, sizes[0], groups, sizes[1], taps), dtype)


def empty(spec: Recurrent, num_drafts: int, kernels=native) -> Slots:
    return Slots(spec, num_drafts, num_slots=SLOTS, begin_pass=kernels.begin_pass)


@dataclass(frozen=True)
class Part:
    """Rows of one slot at ``first`` and on; the inputs of a row follow from its place."""

    slot: int
    first: int
    num_committed: int
    num_drafts: int = 0
    seed: int = 0


def raw_rows(part: Part, spec: Recurrent) -> torch.Tensor:
    """Committed rows are a function of slot and position alone; drafts also of the seed."""
    rows, width = [], spec.rule.conv_channels + sum(spec.rule.gate_sizes) + 3
    for i in range(part.num_committed + part.num_drafts):
        seed = 1000 * part.slot + part.first + i
        seed += 10**6 * part.seed if i >= part.num_committed else 0
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.randn(width, generator=generator))
    return torch.stack(rows).to(spec.dtype)


def split(raw: torch.Tensor, rule) -> tuple[torch.Tensor, ...]:
    """What the convolution mixes, and gates: parts of a wider projection."""
    mixed, _, *gates = raw.split((rule.conv_channels, 3, *rule.gate_sizes), dim=-1)
    return mixed, *gates


def run(cache: Slots, parts: list[Part], params) -> list[torch.Tensor]:
    """One pass."""
    spec = cache.declared
    counts = [part.num_committed + part.num_drafts for part in parts]
    slots = [part.slot for part, n in zip(parts, counts, strict=True) for _ in range(n)]
    positions = [part.first + i for part, n in zip(parts, counts, strict=True) for i in range(n)]
    committed = [
        i < part.num_committed for part, n in zip(parts, counts, strict=True) for i in range(n)
    ]
    slot, position = torch.tensor(slots), torch.tensor(positions)
    rows = AttentionRows(position, slot, slot, slot[None], committed=torch.tensor(committed))
    raw = torch.cat([raw_rows(part, spec) for part in parts])
    running = cache.begin(rows)
    out = cache.run(running, 0, params, *split(raw, spec.rule))
    running.finish()
    return list(out.split(counts))


def assert_same(cache: Slots, other: Slots, slot: int) -> None:
    for name in ("states", "history"):
        assert torch.equal(getattr(cache, name)[:, slot], getattr(other, name)[:, slot])


def test_the_bundle_decides_which_pass_is_opened():
    rows = AttentionRows(*(torch.zeros(1, dtype=torch.int64),) * 3, torch.zeros(1, 1))
    for spec in SPECS:
        assert isinstance(empty(spec, 0, native).begin(rows), NativePass)
        assert isinstance(empty(spec, 0, reference).begin(rows), RowByRowPass)


@pytest.mark.parametrize(
    ("declare", "near"),
    [(delta_of, {FP32: 1e-5, BF16: 2**-7}), (scan_of, {FP32: 1e-4, BF16: 2**-6})],
    ids=["delta", "scan"],
)
@few
@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    taps=st.integers(1, 5),
    dtype=st.sampled_from([BF16, FP32]),
    bias=st.booleans(),
    limit=st.sampled_from([UNLIMITED, (0.3, 0.8)]),
    counts=st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4)),
)
def test_rows_states_and_what_is_kept_are_the_references(
    declare, near, groups, per_group, sizes, taps, dtype, bias, limit, counts
):
    """A prompt with drafts behind it, then a window that folds some of them, then one row."""
    spec = declare(groups, per_group, sizes, taps, dtype)
    params, caches = (
        params_of(spec, bias=bias, limit=limit),
        (empty(spec, 4), empty(spec, 4, reference)),
    )
    prompt, drafts, accepted = counts[0], counts[1], min(counts[1:])
    first = prompt + accepted
    for part in (Part(1, 0, prompt, drafts), Part(1, first, 1, 4, seed=1), Part(1, first + 1, 1)):
        found, wanted = (run(cache, [part], params)[0] for cache in caches)
        assert found.dtype == wanted.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=near[dtype], atol=near[dtype])
        own, plain = caches
        states = own.states[:, 1], plain.states[:, 1]
        torch.testing.assert_close(*states, rtol=near[FP32], atol=near[FP32])
        pending = slice(0, int(plain.num_pending[1]))
        assert torch.equal(own.history[:, 1], plain.history[:, 1])
        for name in ("pending_mixed", "pending_gates"):
            held, kept = (getattr(cache, name)[:, 1, pending] for cache in caches)
            assert torch.equal(held, kept)
        assert torch.equal(own.position, plain.position)
        assert torch.equal(own.num_pending, plain.num_pending)
    assert own.states[:, [0, 2, 3]].isnan().all(), "slots that nobody ran are untouched"


@pytest.mark.parametrize("spread", [-30.0, 30.0])
def test_gates_at_their_ends(spread):
    """Decay of nearly one and of zero; beta of zero and of one."""
    spec = delta_of()
    weight = torch.ones(4, spec.rule.conv_channels)
    params = GatedDeltaParams(spec.rule, torch.ones(4), torch.full((4,), spread), weight, None)
    part = Part(0, 0, 6)
    found, wanted = (run(empty(spec, 0, k), [part], params)[0] for k in (native, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


SPECS = [
    delta_of(),
    delta_of(1, 3, (7, 33), 3, BF16),
    delta_of(1, 1, (128, 128)),
    scan_of(2, 4, (64, 128), 4, BF16),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=["40", "33 bf16", "128", "scan bf16"])


@each_spec
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_chunks_batches_and_threads(spec, threads):
    params, alone = params_of(spec), empty(spec, 0)
    single = torch.cat([run(alone, [Part(2, p, 1)], params)[0] for p in range(21)])
    torch.set_num_threads(threads)
    for lengths in ((21,), (1, 20), (13, 2, 1, 5), (4, 17)):
        cache, out, first, others = empty(spec, 3), [], 0, [0, 0]
        for turn, length in enumerate(lengths):
            before, after = Part(0, others[0], 3 + turn), Part(1, others[1], 2, 2 * (turn % 2))
            out.append(run(cache, [before, Part(2, first, length), after], params)[1])
            first, others = first + length, [others[0] + 3 + turn, others[1] + 2]
        assert torch.equal(torch.cat(out), single)
        assert_same(cache, alone, 2)


@each_spec
@pytest.mark.parametrize("accepted", [0, 1, 6])
def test_bits_do_not_depend_on_windows_and_on_what_is_pending(spec, accepted):
    """Drafts are verified by plain rows: those accepted are what plain rows go on from."""
    params, cache, plain = params_of(spec), empty(spec, 6), empty(spec, 0)
    first, seed = 5, 3
    run(cache, [Part(0, 0, 5)], params)
    run(plain, [Part(0, 0, 5)], params)
    (window,) = run(cache, [Part(0, first, 1, 6, seed)], params)
    # The plain run commits the same inputs row by row.
    raw = raw_rows(Part(0, first, 1, 6, seed), spec)
    for i in range(accepted + 1):
        at = torch.tensor([first + i])
        running = plain.begin(AttentionRows(at, at * 0, at, at[None]))
        (out,) = plain.run(running, 0, params, *split(raw[i : i + 1], spec.rule))
        assert torch.equal(out, window[i])
        running.finish()
    following = Part(0, first + accepted + 1, 1)
    assert torch.equal(run(cache, [following], params)[0], run(plain, [following], params)[0])
    assert_same(cache, plain, 0)


def test_a_slot_that_began_with_drafts_alone_goes_on_from_zeros():
    """A draft model's own drafts; right ones, so that their rows are those of plain decoding."""
    spec = delta_of()
    params, cache, plain = params_of(spec), empty(spec, 3), empty(spec, 0)
    true = torch.cat([run(plain, [Part(0, p, 1)], params)[0] for p in range(4)])
    assert torch.equal(run(cache, [Part(0, 0, 0, 3)], params)[0], true[:3])
    assert torch.equal(run(cache, [Part(0, 2, 2)], params)[0], true[2:])
    assert_same(cache, plain, 0)


def test_slots_are_taken_in_several_batches_where_their_rows_are_many():
    """Prepared rows of all slots together exceed what the kernel holds at once."""
    spec = delta_of(16, 1, (128, 128), taps=2)
    params, cache = params_of(spec), empty(spec, 0)
    parts = [Part(slot, 0, 280) for slot in range(3)]
    outs = run(cache, parts, params)
    for part, out in zip(parts, outs, strict=True):
        alone = empty(spec, 0)
        assert torch.equal(run(alone, [part], params)[0], out)
        assert_same(cache, alone, part.slot)


def test_memory_of_another_dtype_or_with_gaps_is_refused():
    cache, params = empty(delta_of(), 0), params_of(delta_of())
    rows = AttentionRows(*(torch.zeros(1, dtype=torch.int64),) * 3, torch.zeros(1, 1))
    mixed, a, b = torch.zeros(1, 264).split((256, 4, 4), dim=-1)
    raw, layer = RawRows(mixed, (a, b)), cache.layer(0)
    with pytest.raises(InvariantError, match=r"needs contiguous torch\.float32"):
        cache.begin(rows).run(params, raw, replace(layer, states=layer.states.double()))
    with pytest.raises(AssertionError):
        replace(layer, states=layer.states.mT)

"""The C kernel of Mamba-2 against rows in PyTorch, over odd sizes and poisoned memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import FIXED
from helpers.recurrent import Slots
from sametoken.ops.backend import AttentionRows
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.recurrent import NativePass
from sametoken.ops.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
native, reference = NativeKernels(), ReferenceKernels()
BF16, FP32 = torch.bfloat16, torch.float32
SLOTS = 3


def params_of(spec: Recurrent, bias: bool, limit: tuple[float, float]) -> Mamba2Params:
    rule = spec.rule
    generator = torch.Generator().manual_seed(rule.conv_channels)

    def random(*shape, dtype=FP32):
        return torch.randn(shape, generator=generator).to(dtype)

    heads, channels = rule.num_heads, rule.conv_channels
    weight = random(rule.conv_kernel, channels, dtype=spec.dtype)
    gates = random(heads), random(heads), random(heads)
    shift = random(channels, dtype=spec.dtype) if bias else None
    return Mamba2Params(rule, *gates, weight, shift, limit)


def run(cache: Slots, params: Mamba2Params, slot: int, first: int, *counts: int) -> torch.Tensor:
    """Committed rows and drafts of a slot; mixed and dt are parts of a wider projection."""
    spec, (committed, drafts) = cache.declared, counts
    positions = torch.arange(first, first + committed + drafts)
    generator = torch.Generator().manual_seed(100 * slot + first)
    width = spec.rule.conv_channels + spec.rule.num_heads + 3
    raw = torch.randn(len(positions), width, generator=generator).to(spec.dtype)
    mixed, _, dt = raw.split((spec.rule.conv_channels, 3, spec.rule.num_heads), dim=-1)
    slots = torch.full_like(positions, slot)
    is_committed = torch.arange(committed + drafts) < committed
    rows = AttentionRows(positions, slots, slots, slots[None], committed=is_committed)
    running = cache.begin(rows)
    out = cache.run(running, 0, params, mixed, dt)
    running.finish()
    return out


@settings(FIXED, max_examples=25)
@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    taps=st.integers(1, 5),
    dtype=st.sampled_from([BF16, FP32]),
    bias=st.booleans(),
    limit=st.sampled_from([(0.0, float("inf")), (0.3, 0.8)]),
    counts=st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4)),
)
def test_rows_states_and_what_is_kept_are_the_references(
    groups, per_group, sizes, taps, dtype, bias, limit, counts
):
    """A prompt with drafts behind it, then a window that folds some of them, then one row."""
    dim, size = sizes
    spec = Recurrent(Mamba2(groups * per_group, dim, groups, size, taps), dtype)
    params, (prompt, drafts, accepted) = params_of(spec, bias, limit), counts
    own, plain = (
        Slots(spec, 4, num_slots=SLOTS, begin_pass=kernels.begin_pass)
        for kernels in (native, reference)
    )
    first = prompt + min(drafts, accepted)
    for part in ((0, prompt, drafts), (first, 1, 4), (first + 1, 1, 0)):
        found, wanted = (run(cache, params, 1, *part) for cache in (own, plain))
        assert found.dtype == wanted.dtype == dtype
        tolerance = 1e-4 if dtype == FP32 else 2**-6
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(own.states[:, 1], plain.states[:, 1], rtol=1e-4, atol=1e-4)
        assert torch.equal(own.history[:, 1], plain.history[:, 1])
        pending = slice(0, int(plain.num_pending[1]))
        for name in ("pending_mixed", "pending_gates"):
            held, kept = (getattr(cache, name)[:, 1, pending] for cache in (own, plain))
            assert torch.equal(held, kept)
        assert torch.equal(own.position, plain.position)
    assert own.states[:, [0, 2]].isnan().all(), "slots that nobody ran are untouched"


def test_threads_and_company_change_no_bit():
    spec = Recurrent(Mamba2(8, 64, 2, 128, 4), BF16)
    params = params_of(spec, True, (0.0, float("inf")))
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache = Slots(spec, 2, num_slots=SLOTS, begin_pass=native.begin_pass)
        assert isinstance(
            cache.begin(
                AttentionRows(*(torch.zeros(1, dtype=torch.int64),) * 3, torch.zeros(1, 1))
            ),
            NativePass,
        )
        outs.append([run(cache, params, slot, 0, 9, 0) for slot in (0, 2)])
        outs[-1].append(cache.states[:, [0, 2]].clone())
    assert all(torch.equal(one, two) for one, two in zip(*outs, strict=True))

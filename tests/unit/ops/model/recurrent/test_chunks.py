"""Chunks of positions on a GPU: the reference's rows, whatever else a pass runs."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.fast_passes import DEVICE, NUM_SLOTS, OTHERS, empty, run
from helpers.recurrent import begin_as_on_a_gpu
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, FastPrompts
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent.layout import slot_rows
from sametoken.ops.model.recurrent.rule import FAST_ROWS, STATE_STRIDE, Folded
from sametoken.ops.model.recurrent.runs import NUM_ROWS, plan_runs
from sametoken.types.fast_prompts import FastForm

SPECS = [
    Recurrent(rule, torch.float32)
    for rule in (
        GatedDelta(1, 2, 8, 16, 4), GatedDelta(2, 2, 5, 24, 3), GatedDelta(1, 3, 4, 8, 1),
        Mamba2(4, 8, 2, 16, 4), Mamba2(3, 66, 1, 5, 3), Mamba2(2, 16, 2, 20, 1),
    )
]  # fmt: skip
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.rule.state_shape))
# One of each rule.
either_rule = pytest.mark.parametrize("spec", SPECS[::3], ids=lambda spec: type(spec.rule).__name__)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spec", "stride"), zip(SPECS, 3 * (1, STATE_STRIDE), strict=True))
def test_chunks_are_those_of_the_reference(spec, stride):
    """Whole ones and shorter ones of two prompts, from nothing and from a state, beside others."""
    cache, oracle = empty(spec, stride=stride), empty(spec, begin_as_on_a_gpu, stride)
    for parts, num_fast in (
        ([(3, 0, 64)], 1),
        ([*OTHERS, (2, 0, 130), (3, 64, 67)], 2),
        ([(0, 3, 1), (1, 70, 1), (2, 130, 1), (3, 131, 2)], 0),
    ):
        for out, wanted in zip(
            run(cache, parts, num_fast), run(oracle, parts, num_fast), strict=True
        ):
            close(out, wanted)
        assert torch.equal(cache.position, oracle.position)
        assert torch.equal(cache.num_pending, oracle.num_pending)
        folded = cache.position > 0
        close(cache.states[:, folded], oracle.states[:, folded])
        assert torch.equal(cache.history[:, folded], oracle.history[:, folded])
    assert cache.states[:, NUM_SLOTS].isnan().all()


@every_spec
def test_a_prompt_has_the_same_bits_in_every_pass(spec):
    """Cut at any multiples of 64, alone or beside others."""
    whole, cut = empty(spec), empty(spec)
    (wanted,) = run(whole, [(2, 0, 200)], 1)
    first = run(cut, [*OTHERS, (3, 0, 100), (2, 0, FAST_ROWS)], 2)[3]
    second = run(cut, [(0, 3, 1), (2, 64, 128)], 1)[1]
    (third,) = run(cut, [(2, 192, 8)], 1)
    assert torch.equal(torch.cat((first, second, third)), wanted)
    assert torch.equal(cut.states[:, 2], whole.states[:, 2])
    assert torch.equal(cut.history[:, 2], whole.history[:, 2])


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 130, 193])
def test_a_gpu_finds_the_rows_in_the_fast_form_that_the_host_means(length):
    """Of prompts of 64 tokens and more, from every multiple of 64 on."""
    starts = range(0, 200, FAST_ROWS)
    before = torch.tensor([*starts, 0], device=DEVICE)
    slots, positions = torch.arange(len(starts), device=DEVICE), before[:-1]
    prompts = FastPrompts(torch.full_like(before, length), 64)
    runs = runs_of([1] * len(starts), 0, DEVICE)
    rows = AttentionRows(positions, slots, slots, slots[None], runs, fast_prompts=prompts)
    counts = before, torch.zeros_like(before)
    parts = slot_rows(rows, Folded(*counts, 3, 1))
    runs = plan_runs(rows, Folded(*counts, 3, STATE_STRIDE))
    expected = [start < FastForm(64, FAST_ROWS).end(length) for start in starts]
    assert (runs.fast.runs[:, NUM_ROWS.value] > 0).tolist() == expected
    assert (runs.table[:, NUM_ROWS.value] == 0).tolist() == expected
    assert [one.is_fast for one in sorted(parts, key=lambda one: one.slot)] == expected


@either_rule
def test_a_chunk_with_fewer_rows_has_the_bits_of_a_whole_one(spec):
    whole, short = empty(spec), empty(spec)
    (wanted,) = run(whole, [(2, 0, 128)], 1)
    assert torch.equal(run(short, [(2, 0, 70)], 1)[0], wanted[:70])


@either_rule
def test_rows_that_do_not_follow_give_nan_and_change_nothing(spec):
    cache = empty(spec)
    run(cache, [(2, 0, 64), (3, 0, 64)], 2)
    before = [held[:, 2].clone() for held in (cache.states, cache.history)]
    broken, sound = run(cache, [(2, 192, 70), (3, 64, 70)], 2)
    assert broken.isnan().all()
    assert sound.isfinite().all()
    for held, wanted in zip((cache.states, cache.history), before, strict=True):
        assert torch.equal(held[:, 2], wanted)


COMPILED = """
from triton.runtime.jit import JITFunction
from sametoken.ops.model.{folder} import chunks
from sametoken.ops.model.{folder}.rule import {names}
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import CHUNK_FIELDS, FastRuns

chunks.shared_memory = lambda tensor: {memory}
compiled = JITFunction.run

def run(self, *args, **options):
    kernel = compiled(self, *args, **options)
    assert kernel.metadata.shared <= {memory}, kernel.metadata

JITFunction.run = run

def zeros(*size, dtype=torch.bfloat16):
    return torch.zeros(*size, dtype=dtype)

def numbers(*size):
    return zeros(*size, dtype=torch.int64)

rule = {rule}
channels, gates = rule.conv_channels, rule.gate_sizes
states = zeros(4, *rule.state_shape, dtype=torch.float32)
pending = zeros(4, 3, channels), zeros(4, 3, sum(gates))
memory = LayerMemory(states, zeros(4, 3, channels), *pending)
fast = FastRuns(1, 2, 5, numbers(3, 8), numbers(5, CHUNK_FIELDS.value), numbers(2))
raw = RawRows(zeros(300, channels), tuple(zeros(300, size) for size in gates))
heads = [zeros(gates[0]) for _ in range({num_weights})]
params = {name}Params(rule, *heads, zeros(4, channels), None)
chunks.advance_chunks(fast, params, raw, memory, zeros(300, rule.out_features))
"""


@pytest.mark.parametrize(
    ("folder", "rule", "num_weights"),
    [
        ("gated_delta_rule", GatedDelta(16, 32, 128, 128, 4), 2),
        ("mamba2", Mamba2(64, 64, 8, 128, 4), 3),
    ],
)
@pytest.mark.parametrize("memory", [227 << 10, 99 << 10])
def test_they_compile_for_the_memory_of_a_program(tmp_path, folder, rule, num_weights, memory):
    name = type(rule).__name__
    names, facts = f"{name}, {name}Params", {"num_weights": num_weights, "memory": memory}
    code = COMPILED.format(folder=folder, name=name, names=names, rule=rule, **facts)
    compile_launches(code, tmp_path)

"""The walks of long runs on Hopper, in Python: bits of the Triton form under its interpreter.

Both interpreters round where kernels say and fold sums in order, so equal kernels have equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from helpers.compiled import compile_launches, orders_of_sums
from helpers.gluon_interpreter import interpreted
from helpers.recurrent import Slots, params_of
from helpers.rows import runs_of
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.gated_delta_rule.triton import RuleTile
from sametoken.ops.model.mamba2 import triton as mamba2
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.model.recurrent.runs import Runs

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on the CPU, under the interpreters"
)
MAX_PENDING = 104
#: Rows behind all runs, and what they hold: nobody writes it.
BEHIND, UNTOUCHED = 3, 7.0


class Run(NamedTuple):
    """Rows of one slot, and dead ones behind them; a broken run has dead ones alone."""

    new: int
    folded: int = 0
    lasting: int = 0
    dead: int = 0
    empty: bool = False
    broken: bool = False


#: Rows around a group's 32 and the 8 that are unrolled. States are stored after folded rows, after
#: new ones, within a group, at its end, or not at all.
LONG = [
    Run(33, lasting=33, empty=True),
    Run(0, dead=2),
    Run(31, folded=3, lasting=16, dead=1),
    Run(0, dead=3, broken=True),
    Run(97, folded=7, lasting=96),
    Run(1, empty=True),
    Run(32, folded=5, lasting=37),
    Run(57, folded=7, lasting=5),
    Run(0),
    Run(0),
]
MANY = [Run(2, lasting=1), *[Run(0)] * 130, Run(1, folded=1), *[Run(0)] * 9]


@dataclass(frozen=True)
class Form:
    """A rule, and its module in Triton."""

    module: ModuleType
    rule: GatedDelta | Mamba2

    def prepared(self, num_rows: int) -> torch.Tensor:
        """Rows of the size of real ones: keys of about length 1, gates between 0 and 1."""
        rule, channels, gates = self.rule, self.rule.conv_channels, 2 * self.rule.gate_sizes[0]
        keys = rule.num_key_heads if isinstance(rule, GatedDelta) else 0
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(num_rows, channels + gates + keys, generator=generator)
        if keys:
            rows[:, : 2 * keys * rule.key_dim] *= rule.key_dim**-0.5
        rows[:, channels : channels + gates].sigmoid_()
        return rows


@dataclass(frozen=True)
class Scene:
    """Runs, whose prepared rows lie among NaN; the state of a slot that has one is random."""

    form: Form
    runs: list[Run]
    num_short: int
    dtype: torch.dtype = torch.float32

    def table(self) -> Runs:
        lengths = [run.new + run.dead for run in self.runs]
        rows = replace(runs_of(lengths, self.num_short), max_rows=128)
        borders = pairwise(accumulate(lengths, initial=0))
        table = [
            (len(self.runs) - number, *border, *run[:3], run.empty, run.broken)
            for number, (border, run) in enumerate(zip(borders, self.runs, strict=True))
        ]
        return Runs(torch.tensor(table, dtype=torch.int64), rows)

    def prepared(self, table: Runs) -> torch.Tensor:
        """Rows up to the last run's: of one without rows, Mamba-2's Triton form reads one."""
        held = torch.zeros(int(table.rows.starts[-1]) + len(self.runs) * MAX_PENDING, 1).bool()
        for number, (first, run) in enumerate(zip(table.table[:, 1], self.runs, strict=True)):
            begin, count = int(first) + number * MAX_PENDING, run.folded + run.new
            held[begin : begin + count] = True
        held = held[: begin + max(count, 1)]
        return torch.where(held, self.form.prepared(len(held)), torch.nan)

    def passed(self, patch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
        """A pass's outputs, up to the last run, and the slots' memory after it."""
        table, declared = self.table(), Recurrent(self.form.rule, self.dtype)
        patch.setattr(self.form.module, "prepare", lambda *_: self.prepared(table))
        slots = Slots(declared, MAX_PENDING, num_slots=len(self.runs) + 1)
        generator = torch.Generator().manual_seed(2)
        for run, slot in zip(self.runs, table.table[:, 0], strict=True):
            if run.new and not run.empty:
                slots.states[0, slot].normal_(generator=generator)
        num_rows = int(table.rows.starts[-1]) + BEHIND
        mixed, *gates = (
            torch.randn(num_rows, size, generator=generator).to(self.dtype)
            for size in (declared.rule.conv_channels, *declared.rule.gate_sizes)
        )
        raw, memory = RawRows(mixed, tuple(gates)), slots.layer(0)
        out = self.form.module.advance(table, params_of(declared), raw, memory)
        return out[:-BEHIND], *slots.cache.slots

    def walked(self, patch: pytest.MonkeyPatch, seed: int) -> tuple[torch.Tensor, ...]:
        """``passed`` as on Hopper, where the walk serves long runs."""
        hopper = self.form.module.hopper

        def walk(in_python, *given):
            behind = given[-1][-BEHIND:].fill_(UNTOUCHED)
            with interpreted(seed):
                in_python(*given)
            assert (behind == UNTOUCHED).all()

        patch.setattr(hopper, "serves", lambda *_: True)
        patch.setattr(hopper, "walk", partial(walk, hopper.walk))
        return self.passed(patch)


@triton.jit
def keys_by_place(DK: tl.constexpr, V: tl.constexpr):
    """``_keys`` of a head in the order in which the compiler has a thread add them."""
    tl.static_assert(DK == 128 and V == 16)
    lane = tl.arange(0, 8)[None, :, None, None, None, None]
    place = tl.arange(0, 4)[None, None, None, None, :, None]
    run = tl.arange(0, 4)[None, None, None, None, None, :]
    return (run * 8 + lane) * 4 + place


@pytest.fixture(autouse=True)
def order_of_a_gpu(monkeypatch):
    """A thread has one part of the keys, and adds them by place; Mamba-2's order is any tile's."""
    monkeypatch.setattr(gated_delta_rule, "_TILE", RuleTile(16, 2, 4))
    monkeypatch.setattr(gated_delta_rule, "_keys", keys_by_place)


GATED = Form(gated_delta_rule, GatedDelta(1, 1, 128, 32, 4))
MAMBA2 = Form(mamba2, Mamba2(1, 32, 1, 128, 4))
SEVERAL_HEADS = (
    Form(gated_delta_rule, GatedDelta(2, 4, 128, 64, 4)),
    Form(mamba2, Mamba2(4, 64, 2, 128, 4)),
)


def require_equal_bits(scene: Scene, patch: pytest.MonkeyPatch, seed: int) -> None:
    expected = scene.passed(patch)
    for found, wanted in zip(scene.walked(patch, seed), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", [GATED, MAMBA2], ids=["gated delta", "mamba2"])
def test_runs_of_any_length_have_the_bits_of_the_triton_form(form, seed, monkeypatch):
    """Two programs share the long runs, in any order; the first is behind short ones."""
    short = [Run(2, folded=1, lasting=1), Run(0, dead=1)]
    require_equal_bits(Scene(form, [*short, *LONG], len(short)), monkeypatch, seed)


@pytest.mark.parametrize("form", SEVERAL_HEADS, ids=["gated delta", "mamba2"])
def test_every_part_of_every_head_has_the_bits_of_the_triton_form(form, monkeypatch):
    runs = [Run(9, folded=2, lasting=10), Run(0, dead=1), Run(3, empty=True, dead=1), Run(1)]
    require_equal_bits(Scene(form, runs, 0, torch.float16), monkeypatch, 0)


@pytest.mark.parametrize("form", [GATED, MAMBA2], ids=["gated delta", "mamba2"])
def test_runs_behind_many_without_rows_are_walked(form, monkeypatch):
    """The walk looks for the last run with rows 128 runs at once."""
    require_equal_bits(Scene(form, MANY, 1), monkeypatch, 0)


ADVANCE = """
from sametoken.ops.backend import RowRuns
from sametoken.ops.model.gated_delta_rule import triton
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows
from sametoken.ops.model.recurrent.runs import Runs

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

rule, gates = GatedDelta(1, 1, 128, 128, 4), (zeros(8, 1), zeros(8, 1))
raw, prepared = RawRows(zeros(8, rule.conv_channels), gates), torch.zeros(99, 387)
held = zeros(3, 3, rule.conv_channels)
memory = LayerMemory(torch.zeros(3, 1, 128, 128), held, held, zeros(3, 3, 2))
runs = Runs(torch.zeros(2, 8, dtype=torch.int64), RowRuns.even(2, 4))
triton.advance_prepared(runs, rule, prepared, raw, memory, None)
"""


def test_the_compiler_has_a_thread_add_keys_by_place(tmp_path):
    """Which the walk's own layout says, and ``keys_by_place`` says to an interpreter."""
    compile_launches(ADVANCE, tmp_path)
    (orders,) = orders_of_sums(tmp_path, "_advance_kernel")
    assert ((4, 8, 1, 2), (), ()) in orders

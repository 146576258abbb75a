"""Recurrent state: of rejected drafts, of a former request, kept for later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from mutants.catalogue.planting import instead_of, mutant
from mutants.catalogue.shared_tests import NEMOTRON
from sametoken.ops.model.gated_delta_rule import hopper_kernels as gated_delta_rule
from sametoken.ops.model.mamba2 import hopper_kernels as mamba2
from sametoken.ops.model.recurrent.layout import SlotRows
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import Folded
from sametoken.ops.native.recurrent import NativePass, part_table
from sametoken.runner.kept_states import CacheStates, KeptStateStore

ZERO_DRAFTS = (
    "tests/regression/test_vllm_39273.py::test_a_step_without_drafts_after_accepted_drafts"
)
TRAINED_ZERO_DRAFTS = (
    "tests/regression/test_vllm_39273.py"
    "::test_the_reported_request_on_a_trained_hybrid[nemotron-h-31m-0.8]"
)
SLOT_REUSE = (
    "tests/e2e/test_recurrent_slots.py::test_a_slot_s_next_request_sees_nothing_of_the_last"
)
KEPT_STATE = "tests/e2e/test_kept_states.py::test_a_chat_goes_on_from_its_last_answer[right]"
WALK = (
    "tests/unit/ops/model/recurrent/test_hopper.py"
    "::test_runs_of_any_length_have_the_bits_of_the_triton_form"
)
NEMOTRON_KEPT = f"{NEMOTRON}_a_kept_state_serves_the_next_turn[nemotron]"


def with_parts(patch: pytest.MonkeyPatch, change: Callable[[SlotRows, Folded], SlotRows]) -> None:
    """Change what kernels run of a slot, in PyTorch and in C, and not what is noted of it."""

    @instead_of(patch, RowByRowPass, "_run_slot")
    def run_changed(run_slot, self, part, *rest):
        return run_slot(self, change(part, self.folded), *rest)

    @instead_of(patch, NativePass, "begin")
    def begin_changed(begin, rows, folded, library):
        found = begin(rows, folded, library)
        parts = tuple(change(part, folded) for part in found.row_by_row.parts)
        return replace(found, table=part_table(parts))


@mutant("slot-0-read-on-a-zero-draft-step", "vllm#39273", ZERO_DRAFTS, "tokens")
@mutant("slot-0-read-on-a-trained-nemotron", "vllm#39273", TRAINED_ZERO_DRAFTS, "tokens")
def a_step_without_drafts_does_not_fold(patch: pytest.MonkeyPatch) -> None:
    """It goes on from the state of its last window's first position."""

    def change(part, folded):
        return replace(part, num_folded=0, num_lasting=1) if part.num_rows == 1 else part

    with_parts(patch, change)


@mutant("recurrent-state-of-rejected-drafts", "vllm#39273", ZERO_DRAFTS, "tokens")
def rejected_drafts_are_folded(patch: pytest.MonkeyPatch) -> None:
    """All that is pending is folded, as if every draft had been accepted."""

    def change(part, folded):
        if part.starts:
            return part
        pending = int(folded.num_pending[part.slot])
        more = pending - part.num_folded
        return replace(part, num_folded=pending, num_lasting=part.num_lasting + more)

    with_parts(patch, change)


@mutant(
    "gated-delta-walk-folds-drafts", "vllm#39273", f"{WALK}[gated delta-0]", "tokens",
    kernels=gated_delta_rule,
)  # fmt: skip
@mutant(
    "mamba-2-walk-folds-drafts", "vllm#39273", f"{WALK}[mamba2-0]", "tokens", kernels=mamba2
)  # fmt: skip
def a_walk_on_hopper_folds_drafts(patch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    """States are stored after all rows, as if every draft had been accepted."""
    facts_of = kernels.facts_of.fn

    def mutant(field):
        *facts, (num_folded, _, total) = facts_of(field)
        return *facts, (num_folded, total, total)

    patch.setattr(kernels, "facts_of", mutant)


@mutant("recurrent-state-of-a-former-request", "the law: recurrent state", SLOT_REUSE, "tokens")
def a_slot_keeps_its_recurrent_state(patch: pytest.MonkeyPatch) -> None:
    """The next request's first row goes on from the last one's state."""

    @instead_of(patch, RowByRowPass, "_run_slot")
    def mutant(run_slot, self, part, *rest):
        if part.starts and self.folded.position[part.slot] > 0:
            part = replace(part, starts=False)
        return run_slot(self, part, *rest)


@mutant("state-kept-unfolded", "docs/decisions/0024", KEPT_STATE, "tokens")
def what_is_pending_in_a_kept_state_is_lost(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, CacheStates, "restore")
    def mutant(restore, self, copy):
        restore(self, copy)
        self.folded.position[copy.slot] = copy.position
        self.folded.num_pending[copy.slot] = 0


@mutant("state-kept-a-step-late", "docs/decisions/0024", KEPT_STATE, "tokens")
def states_are_kept_after_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """And said to be what they should have been, since a state of later rows is refused."""
    late = []

    def mutant(self, plan, num_computed):
        for copy in late:
            for cache in self.caches:
                for slots, kept in zip(cache.slots, cache.kept, strict=True):
                    kept[:, copy.state] = slots[:, copy.slot]
                cache.folded_positions[copy.state] = copy.position
        late[:] = plan.kept_states

    patch.setattr(KeptStateStore, "keep", mutant)


@mutant("snapshot-committed-but-never-written", "docs/decisions/0024", NEMOTRON_KEPT, "tokens")
def a_kept_state_is_not_written(patch: pytest.MonkeyPatch) -> None:
    """The table says that it is there."""

    @instead_of(patch, CacheStates, "keep")
    def mutant(keep, self, copy, num_computed):
        keep(replace(self, kept=tuple(memory.clone() for memory in self.kept)), copy, num_computed)
        # Freed memory of an earlier engine may hold the very states that are missing.
        for memory in self.kept:
            memory.zero_()

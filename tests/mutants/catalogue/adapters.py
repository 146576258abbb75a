"""Adapters of other requests."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest

from mutants.catalogue.planting import mutant
from sametoken.models.load import adapter
from sametoken.ops.model.low_rank import SeparateUpdates
from sametoken.ops.model.low_rank_experts import AdaptedSeparateExperts
from sametoken.ops.model.moe import SeparateExperts
from sametoken.runner.adapters import AdaptedSteps, AdaptedTarget
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.scheduler import Scheduler

ADAPTERS = "tests/e2e/test_lora.py::test"
ADAPTED = f"{ADAPTERS}_drafts_chunks_and_other_adapters_change_no_bit[spec1-compact-3]"
EXPERTS = f"{ADAPTERS}_adapters_of_experts_change_no_bit_of_other_rows"
COMING = "tests/e2e/test_live_adapters.py::test_adapters_come_and_go_and_leave_nothing_behind[1]"
WAITING = "tests/e2e/test_live_adapters.py::test_a_request_that_waits_keeps_its_adapter"
WRITTEN = (
    "tests/unit/models/load/test_adapter.py::test_files_that_are_written_meanwhile_are_refused"
)
OTHER_PREFIXES = f"{ADAPTERS}_prefixes_are_shared_by_requests_of_one_adapter_alone"


@mutant("prefixes-of-another-adapter", "docs/decisions/0045", OTHER_PREFIXES, "tokens")
def keys_know_no_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVMemory, "_root", lambda self, request: b"")


@mutant("a-slot-keeps-its-former-adapter", "docs/decisions/0045", ADAPTED, "tokens")
def adapters_are_admitted_once(patch: pytest.MonkeyPatch) -> None:
    admit, seen = AdaptedSteps.admit, set()

    def mutant(self, admission):
        first = (id(self), admission.slot) not in seen
        seen.add((id(self), admission.slot))
        return admit(self, admission) if first else []

    patch.setattr(AdaptedSteps, "admit", mutant)


@mutant("rows-read-the-adapters-of-requests-in-order", "docs/decisions/0045", ADAPTED, "tokens")
def adapters_by_place(patch: pytest.MonkeyPatch) -> None:
    """The n-th request of a step gets what the n-th slot has."""

    @contextmanager
    def mutant(self, rows):
        _, places = rows.slots.unique_consecutive(return_inverse=True)
        self._rows.begin(self._by_slot.index_select(0, places))
        yield

    patch.setattr(AdaptedTarget, "around", mutant)


@mutant("experts-read-the-adapters-of-the-first-rows", "docs/decisions/0045", EXPERTS, "tokens")
def an_expert_s_rows_are_the_first(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, expert, x, rows, out_dtype):
        self.own_rows.begin(self.rows.of(x).numbers[: rows.shape[0]])
        return SeparateExperts.of_expert(self, expert, x, rows, out_dtype)

    patch.setattr(AdaptedSeparateExperts, "of_expert", mutant)


@mutant("a-step-without-adapters-by-its-first-request", "docs/decisions/0045", ADAPTED, "tokens")
def only_the_first_request_counts(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, plan, plain):
        return self.launcher if plan.requests[0].slot in self._adapted else plain

    patch.setattr(AdaptedSteps, "launcher_of", mutant)


@mutant("prefixes-of-the-adapter-before", "docs/decisions/0045", COMING, "tokens")
def keys_have_places(patch: pytest.MonkeyPatch) -> None:
    """As an adapter's place is in its keys, not its number."""
    patch.setattr(KVMemory, "_root", lambda self, request: b"adapter" if request.adapter else b"")


@mutant("factors-of-the-adapter-before-stay", "docs/decisions/0045", COMING, "tokens")
def what_an_adapter_lacks_is_not_cleared(patch: pytest.MonkeyPatch) -> None:
    prepare = SeparateUpdates.prepare

    def mutant(self, parts):
        return prepare(self, parts) if any(parts) else lambda place: None

    patch.setattr(SeparateUpdates, "prepare", mutant)


@mutant("an-adapter-over-that-of-a-request-that-waits", "docs/decisions/0045", WAITING, "tokens")
def only_requests_that_run_have_places(patch: pytest.MonkeyPatch) -> None:
    """The others begin with the newest adapter."""
    admit = AdaptedSteps.admit

    def mutant(self, admission):
        there = admission.adapter in (0, *self.places)
        newest = admission if there else replace(admission, adapter=max(self.places))
        return admit(self, newest)

    running = property(lambda self: {one.request.adapter for one in self._running.values()})
    patch.setattr(Scheduler, "adapters_in_use", running)
    patch.setattr(AdaptedSteps, "admit", mutant)


@mutant("an-adapter-of-two-steps-of-a-trainer", "docs/decisions/0045", WRITTEN, "guard")
def files_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapter, "_stamps", lambda path: ())

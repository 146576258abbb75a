"""Blocks, prefixes and swapped KV."""

from __future__ import annotations

import pytest

from mutants.catalogue.planting import LAW, instead_of, mutant, substitute
from mutants.catalogue.shared_tests import WINDOW
from sametoken.ops.step.types import TableWrite
from sametoken.runner.swap import SwapStore
from sametoken.scheduler.block_pool import block_keys
from sametoken.scheduler.request_state import RequestState
from sametoken.state import slots

LOOKAHEAD_PREFIXES = (
    "tests/e2e/test_acceptance.py"
    "::test_shared_prefixes_and_chunk_edges_cost_no_acceptance[lookahead-4]"
)
PREEMPTION = "tests/e2e/test_acceptance.py::test_preemption_costs_no_acceptance[self]"
REPLAY = (
    "tests/e2e/test_swap.py"
    "::test_without_room_on_the_host_what_was_lost_is_computed_again[ToyModel-1]"
)
IDLE_PREFIX = "tests/e2e/test_swap.py::test_idle_prefixes_go_to_host_memory_and_return"


@mutant("prefix-key-without-lookahead", "docs/decisions/0003", LOOKAHEAD_PREFIXES, "acceptance")
def prefix_keys_do_not_look_ahead(patch: pytest.MonkeyPatch) -> None:
    def mutant(token_ids, block_size, lookahead_tokens, root=b""):
        return block_keys(token_ids, block_size, 0, root)

    substitute(patch, block_keys, mutant)


@mutant("drafter-kv-left-behind-by-preemption", "docs/decisions/0002", PREEMPTION, "acceptance")
def drafter_kv_is_not_swapped(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, SwapStore, "__init__")
    def mutant(start, self, caches, *sizes, **options):
        start(self, caches[:1], *sizes, **options)


@mutant("lost-kv-taken-for-computed", LAW, REPLAY, "position")
def a_restart_does_not_reach_the_device(patch: pytest.MonkeyPatch) -> None:
    def mutant(sequences, slot):
        return TableWrite(sequences.num_drafts[slot], 0)

    substitute(patch, slots.restart, mutant)


@mutant("evicted-block-saved-a-step-late", LAW, IDLE_PREFIX, "tokens")
def blocks_are_saved_when_others_write_them(patch: pytest.MonkeyPatch) -> None:
    late = []

    @instead_of(patch, SwapStore, "move_out")
    def mutant(save, self, plan):
        for earlier in late:
            save(self, earlier)
        late[:] = [plan]


@mutant("block-freed-behind-a-window-too-early", LAW, WINDOW, "tokens")
def a_window_s_first_position_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    position = RequestState.next_position.fget
    early = property(lambda self: position(self) + 2)
    patch.setattr(RequestState, "next_position", early)

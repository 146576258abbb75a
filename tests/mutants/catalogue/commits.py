"""What a step makes true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mutants.catalogue.planting import (
    KERNELS,
    LAW,
    STATIC,
    in_every_program,
    mutant,
    optimistic_end,
    substitute,
)
from mutants.catalogue.shared_tests import FEW, FORMER_DRAFTS
from sametoken.ops.sampling.sample import has_nan
from sametoken.ops.step.types import HAS_NAN
from sametoken.state import slots


@mutant("rejected-drafts-committed", LAW, f"{FEW}[mixed]", "position", KERNELS)
def rejected_drafts_are_committed(patch: pytest.MonkeyPatch) -> None:
    @in_every_program(patch, "commit")
    def mutant(commit, sequences, x, _, next_token):
        return commit(sequences, x, x.num_drafts, next_token)


@mutant("kv-of-rejected-drafts-addressable", LAW, f"{FEW}[mixed]", "position")
def rejected_kv_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    @in_every_program(patch, "commit")
    def mutant(commit, sequences, x, num_accepted, next_token):
        lengths = commit(sequences, x, num_accepted, next_token)
        sequences.num_computed[x.slots] = optimistic_end(x)
        return lengths


@mutant("padding-committed", LAW, f"{FEW}[right]", "position", STATIC)
def padding_commits(patch: pytest.MonkeyPatch) -> None:
    """A row of padding counts as one that samples."""

    @in_every_program(patch, "commit")
    def mutant(commit, sequences, x, num_accepted, next_token):
        samples = x.samples | (x.slots == sequences.reserved_slot)
        return commit(sequences, replace(x, samples=samples), num_accepted, next_token)


@mutant("drafts-of-a-former-request", "vllm#39273", FORMER_DRAFTS, "acceptance", STATIC)
def a_slot_keeps_its_drafts(patch: pytest.MonkeyPatch) -> None:
    original = slots.admit

    def mutant(sequences, admission):
        kept = sequences.num_drafts[admission.slot].data_ptr()
        return [one for one in original(sequences, admission) if one.part.data_ptr() != kept]

    substitute(patch, original, mutant)


@mutant(
    "nan-behind-an-accepted-draft-voids-its-window",
    "the law: faults",
    "tests/e2e/test_nan.py::test_nan_behind_an_accepted_draft_takes_no_token[stop_token_ids1]",
    "tokens",
)
def a_fault_behind_a_draft_is_the_window_s(patch: pytest.MonkeyPatch) -> None:
    @in_every_program(patch, "verify")
    def mutant(verify, keys, x, chances=None):
        found = verify(keys, x, chances)
        at = (x.window_starts[:-1] + found.num_accepted).clamp(max=len(keys) - 2)
        led_there = found.tokens[at] == x.sampled.token_ids[at + 1]
        behind = (found.num_accepted < x.num_drafts) & led_there & has_nan(keys.amax(1))[at + 1]
        return replace(
            found,
            num_accepted=found.num_accepted.masked_fill(behind, 0),
            faults=found.faults.masked_fill(behind, HAS_NAN),
        )

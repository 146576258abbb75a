"""Ranks that decide for themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mutants.catalogue.planting import LAW, instead_of, mutant
from sametoken.drafters.combined import SharedDrafter
from sametoken.runner.step import Step

TWO_RANKS = "tests/e2e/test_tensor_parallel.py::test_the_same_tokens"


@mutant("rank-runs-drafts-of-its-own", LAW, f"{TWO_RANKS}[llama-self-3-6-16]", "tokens")
def a_rank_runs_drafts_of_its_own(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, SharedDrafter, "propose")
    def mutant(propose, self, context):
        drafts = propose(self, context)
        if self._parallel.rank == 0:
            return drafts
        return replace(drafts, draft_ids=(drafts.draft_ids + 1) % 7)


@mutant("rank-commits-a-token-of-its-own", LAW, f"{TWO_RANKS}[llama-ngram-2-6-32]", "tokens")
def rank_0_s_verdict_stays_its_own(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, Step, "_verify")
    def mutant(verify, self, computed):
        verdict = verify(self, computed)
        if self.parallel.rank == 0:
            return verdict
        return replace(verdict, next_token=(verdict.next_token + 1) % 7)

"""Ranks that decide for themselves, and exchanges between them that go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton.language as tl

from mutants.catalogue.planting import LAW, instead_of, mutant
from sametoken.drafters.combined import SharedDrafter
from sametoken.ops.model import peers_triton
from sametoken.runner.step import Step

TWO_RANKS = "tests/e2e/test_tensor_parallel.py::test_the_same_tokens"
WRITTEN = "docs/decisions/0047"
EXCHANGE = "tests/unit/ops/model/test_peers.py::test"
MEETING = f"{EXCHANGE}_all_ranks_have_the_sum_in_rank_order_and_bits_as_they_are[0-False-3-2]"
AHEAD = f"{EXCHANGE}_a_rank_that_is_an_exchange_ahead_is_not_waited_for"
#: At a flag, by a rank that would look at it for ever.
MOST_LOOKS = 1000


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


@mutant("blocks-of-one-parity", WRITTEN, MEETING, "tokens")
def a_block_is_written_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, peers_triton, "_block_of")
    def mutant(block_of, buffers, at, channel, count, *rest):
        return block_of(buffers, at, channel, count * 0, *rest)


@mutant("flags-compared-for-equality", WRITTEN, AHEAD, "tokens")
def a_rank_waits_for_a_flag_that_has_passed(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, peers_triton, "_wait")
    def mutant(wait, flag, stopped, count):
        for _ in range(MOST_LOOKS):
            if tl.load(flag, volatile=True) == count:
                return
        raise TimeoutError


@mutant("own-partial-sum-first", WRITTEN, MEETING, "tokens")
def each_rank_adds_its_own_first(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, peers_triton, "_of_rank")
    def mutant(of_rank, mine, inside, buffers, channel, count, rank, own, channels):
        # Gathers are of integers.
        other = rank if mine.dtype.is_int() else (rank + own) % len(buffers)
        return of_rank(mine, inside, buffers, channel, count, other, own, channels)

"""Lengths and positions that count rejected drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mutants.catalogue.planting import (
    LAW,
    STATIC,
    in_every_program,
    instead_of,
    mutant,
    optimistic_end,
)
from mutants.catalogue.shared_tests import EAGLE_HEAD, LOOKAHEAD, MTP_MODULE, SELF
from sametoken.drafters.context import DraftContext
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.ops.step import reference
from sametoken.ops.step import triton as in_triton
from sametoken.runner import step
from sametoken.types.length_bound import LenBound

BACKUP_TOKEN = (
    "tests/regression/test_vllm_38419.py::test_a_draft_chain_goes_on_from_the_committed_token[3]"
)
TRAINED_BACKUP_TOKEN = (
    "tests/regression/test_vllm_38419.py::test_so_does_that_of_a_trained_nemotron[3]"
)
TRIMMED_LENGTHS = (
    "tests/regression/test_tokenspeed_318.py"
    "::test_rejected_drafts_leave_nothing_in_the_module_s_rows[qwen3_5-4]"
)
NEXTN_LENGTHS = TRIMMED_LENGTHS.replace("qwen3_5", "deepseek")


@mutant(
    "optimistic-length-taken-for-exact",
    "vllm#38419",
    "tests/unit/types/test_length_bound.py::test_an_unsettled_length_cannot_be_used_as_an_index",
    "guard",
)
def exact_is_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LenBound, "exact", property(lambda self: self.hi))


@mutant("backup-token-from-optimistic-length", "vllm#38419", SELF, "acceptance", STATIC)
def chain_starts_at_the_optimistic_length(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, DraftModelDrafter, "propose")
    def mutant(propose, self, context):
        end = torch.where(context.samples, optimistic_end(context.x), context.end)
        return propose(self, replace(context, end=end, num_tokens=end + 1))


@mutant("backup-token-from-optimistic-length-under-mtp", "vllm#38419", BACKUP_TOKEN, "acceptance")
@mutant("backup-token-on-a-trained-nemotron", "vllm#38419", TRAINED_BACKUP_TOKEN, "acceptance")
def newest_token_is_read_at_the_optimistic_length(patch: pytest.MonkeyPatch) -> None:
    """Where nothing is committed yet, if a draft was rejected."""

    @instead_of(patch, DraftContext, "catch_up")
    def mutant(catch_up, self):
        found = catch_up(self)
        owner = slice(None) if found.chains.owner is None else found.chains.owner
        token_ids = found.token_ids.clone()
        newest = self.tokens_at(self.slots[owner], optimistic_end(self.x)[owner])
        token_ids[found.chains.last.index] = newest.clamp(min=0)
        return replace(found, token_ids=token_ids)


@mutant("drafter-lengths-not-trimmed", "tokenspeed#318", LOOKAHEAD, "acceptance")
@mutant(
    "lengths-of-an-mtp-module-not-trimmed", "tokenspeed#318", TRIMMED_LENGTHS, "acceptance", STATIC
)
@mutant("lengths-of-nextn-not-trimmed", "tokenspeed#318", NEXTN_LENGTHS, "acceptance", STATIC)
def end_counts_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, step, "DraftContext")
    def mutant(context, *, x, end, **others):
        end = torch.where(x.samples, optimistic_end(x), end)
        return context(x=x, end=end, **others)


@mutant("drafter-rows-not-trimmed", "tokenspeed#318", LOOKAHEAD, "acceptance", STATIC)
@mutant("rows-of-an-eagle-head-not-trimmed", "tokenspeed#318", EAGLE_HEAD, "position")
@mutant("rows-of-an-mtp-module-not-trimmed", "tokenspeed#318", MTP_MODULE, "position", STATIC)
@mutant(
    "rejected-rows-extracted",
    LAW,
    "tests/unit/drafters/test_extract.py::test_rows_are_the_committed_ones_whatever_was_drafted[4]",
    "position",
    STATIC,
)
def live_rows_are_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Rejected ones too, with some token wherever there is none; chains go on from the last."""

    # The compact program takes the reference's rows.
    @in_every_program(patch, "catch_up", (reference, in_triton))
    def mutant(catch_up, sequences, x, end, *, with_newest):
        all_rows = torch.where(x.samples, optimistic_end(x), end)
        found = catch_up(sequences, x, all_rows, with_newest=with_newest)
        chains = catch_up(sequences, x, end, with_newest=with_newest).chains
        return replace(
            found,
            token_ids=found.token_ids.clamp(min=0),
            chains=replace(chains, last=found.chains.last),
        )


@mutant("drafter-lengths-trimmed-in-place", "tokenspeed#318", LOOKAHEAD, "position", STATIC)
@mutant(
    "lengths-of-an-mtp-module-trimmed-in-place",
    "tokenspeed#318",
    TRIMMED_LENGTHS,
    "acceptance",
    STATIC,
)
def lengths_are_trimmed_in_place(patch: pytest.MonkeyPatch) -> None:
    """The rejected drafts are taken off once more, but for the step's first row."""

    @instead_of(patch, DraftContext, "catch_up")
    def mutant(catch_up, self):
        rejected = optimistic_end(self.x) - self.end
        first = torch.minimum(self.x.num_computed + 1, self.end)
        self.end.copy_(torch.maximum(self.end - rejected, first))
        return catch_up(self)


@mutant("drafter-positions-advanced-in-place", "tokenspeed#318", SELF, "position", STATIC)
def positions_are_advanced_in_place(patch: pytest.MonkeyPatch) -> None:
    """A chain that steps its positions forward in the context's own tensor."""

    @instead_of(patch, DraftModelDrafter, "propose")
    def mutant(propose, self, context):
        context.end.add_(1)
        return propose(self, context)

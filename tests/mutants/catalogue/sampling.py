"""Sampling and grammars."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mutants.catalogue.planting import STATIC, instead_of, mutant
from mutants.catalogue.shared_tests import FEW
from sametoken.ops.reference import ComposedKernels
from sametoken.runner.step import Step
from sametoken.sampling.grammar_masks import Cursor, SlotGrammars
from sametoken.text.grammar.after_reasoning import MatcherAfterReasoning, _Place

STRUCTURED = "tests/e2e/test_structured_outputs.py::test"
WRONG_DRAFTS = f"{STRUCTURED}_drafts_of_the_right_form_that_are_wrong_leave_no_trace"
NEXT_GRAMMAR = f"{STRUCTURED}_a_slot_s_next_request_starts_its_own_grammar"
EARLY_END = "tests/e2e/test_reasoning_first.py::test_the_end_in_a_rejected_draft_ends_nothing[0]"


@mutant(
    "noise-keyed-by-step-instead-of-position",
    "the law: keyed sampling",
    f"{FEW}[right]",
    "tokens",
)
def noise_is_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, Step, "_verify")
    def mutant(verify, self, computed):
        x = computed.x
        positions = torch.full_like(x.sampled.positions, int(x.step_ids[0]))
        x = replace(x, sampled=replace(x.sampled, positions=positions))
        return verify(self, replace(computed, x=x))


@mutant(
    "penalties-without-the-rows-own-prefix", "the law: sampling", f"{FEW}[right]", "tokens", STATIC
)
def penalties_see_committed_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    """Every row is judged as its window's first."""

    @instead_of(patch, ComposedKernels, "apply_rules")
    def mutant(apply_rules, logits, rows, committed, rules):
        first = rows.positions - rows.offsets
        rows = replace(rows, positions=first, offsets=torch.zeros_like(first))
        apply_rules(logits, rows, committed, rules)


@mutant("grammar-mask-of-the-first-row-for-all", "the law: sampling", WRONG_DRAFTS, "tokens")
def every_row_has_the_first_row_s_mask(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, Cursor, "fill")
    def mutant(fill, self, masks, drafts):
        fill(self, masks, drafts)
        masks[1:] = masks[0]


@mutant("grammar-advanced-over-rejected-drafts", "the law: sampling", WRONG_DRAFTS, "tokens")
def the_matcher_keeps_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """It goes on from the drafts that were tried, accepted or not."""

    def mutant(self, masks, drafts):
        self.matcher.fill(masks, 0)
        for row, draft in enumerate(drafts):
            if not self.matcher.accept(draft):
                break
            self.position += 1
            self.matcher.fill(masks, row + 1)

    patch.setattr(Cursor, "fill", mutant)


@mutant("grammar-of-a-former-request", "the law: sampling", NEXT_GRAMMAR, "tokens")
def a_slot_keeps_its_grammar(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, SlotGrammars, "admit")
    def mutant(admit, self, admission):
        if admission.slot not in self._cursors:
            admit(self, admission)


@mutant("grammar-begun-by-a-rejected-end", "the law: sampling", EARLY_END, "tokens")
def a_draft_ends_the_reasoning(patch: pytest.MonkeyPatch) -> None:
    """The copy that tries drafts and the matcher share the fact that the reasoning has ended."""

    class Telling(MatcherAfterReasoning):
        def _take(self, token_id: int) -> None:
            super()._take(token_id)
            if self.place is _Place.IN_TEXT:
                self.origin.place = self.place

    def mutant(self):
        ahead = Telling(
            self.inner and self.inner.copy(),
            self.reasoning,
            self.place,
            self.newest,
            self.num_counted,
        )
        ahead.origin = self
        return ahead

    patch.setattr(MatcherAfterReasoning, "copy", mutant)


@mutant("reasoning-budget-spent-by-rejected-drafts", "the law: sampling", EARLY_END, "tokens")
def drafts_spend_the_budget(patch: pytest.MonkeyPatch) -> None:
    """The budget counts the drafts of a window instead of the tokens that were committed."""

    @instead_of(patch, Cursor, "fill")
    def mutant(fill, self, masks, drafts):
        fill(self, masks, drafts)
        # Below the time limit of masks.
        matcher = self.matcher.inner
        matcher.num_counted += len(drafts)

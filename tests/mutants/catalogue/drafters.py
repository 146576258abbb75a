"""Draft heads, and KV that a drafter misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mutants.catalogue.planting import LAW, STATIC, instead_of, mutant, optimistic_end
from mutants.catalogue.shared_tests import EAGLE_HEAD, MTP_MODULE, NEMOTRON, NEXTN
from sametoken.drafters import heads, state_head
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.combined import CascadeDrafter
from sametoken.drafters.context import DraftContext
from sametoken.drafters.eagle import EagleDrafter
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.heads.nextn import NextNHead

TOKEN_MAP = (
    "tests/e2e/test_draft_heads.py::test_a_twin_is_right_wherever_the_map_has_the_token[3-0]"
)
SHARED_HEAD = (
    "tests/e2e/test_shared_weight_updates.py::test_a_shared_lm_head_follows_the_target[2-True]"
)
CASCADE = "tests/e2e/test_cascade.py::test_the_model_s_kv_is_whole_after_turns_of_the_lookup[1]"
PREFIXES = "tests/e2e/test_acceptance.py::test_shared_prefixes_and_chunk_edges_cost_no_acceptance"
FEWER = (
    "tests/unit/drafters/test_eagle.py"
    "::test_fewer_drafts_are_the_first_of_all_and_its_kv_is_whole_without_any[eagle3]"
)
STATE = (
    "tests/e2e/test_acceptance.py::test_exactly_the_drafts_before_the_spoilt_one_are_accepted"
    "[state-1-late-0.0]"
)
NEMOTRON_TWIN = f"{NEMOTRON}_a_module_that_is_its_target_s_twin_is_always_accepted[8-5-1]"
NEMOTRON_END = f"{NEMOTRON}_a_request_may_end_at_the_longest_length"


@mutant("columns-of-a-token-map-taken-for-tokens", LAW, TOKEN_MAP, "acceptance")
def draft_columns_are_taken_for_tokens(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, MTPCheckpoint, "load")
    def mutant(load, self, shared, **options):
        return replace(load(self, shared, **options), token_ids=None)


@mutant("draft-head-keeps-the-lm-head-of-older-weights", LAW, SHARED_HEAD, "acceptance")
def no_shared_lm_head_is_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads, "SharedHead", lambda weight, made_of: None)


@mutant("state-head-starts-at-a-rejected-row", LAW, STATE, "acceptance")
@mutant("state-head-starts-at-a-rejected-static-row", LAW, STATE, "acceptance", STATIC)
def chains_start_as_if_every_draft_were_accepted(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, state_head, "_last_accepted")
    def mutant(last_accepted, context):
        return last_accepted(replace(context, end=optimistic_end(context.x)))


@mutant("nextn-embedding-at-position-0-not-zeroed", "docs/decisions/0031", NEXTN, "position")
def the_first_embedding_is_kept(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, NextNHead, "_inputs")
    def mutant(inputs, self, token_ids, hidden, rows):
        return inputs(self, token_ids, hidden, replace(rows, positions=rows.positions + 1))


@mutant("cascade-leaves-the-model-s-kv-behind", LAW, CASCADE, "position")
def a_cascade_s_model_misses_turns(patch: pytest.MonkeyPatch) -> None:
    """Where the lookup has drafts for every row, the model's KV is left behind."""

    @instead_of(patch, CascadeDrafter, "propose")
    def mutant(propose, self, context):
        first = self._lookup.propose(context)
        live = context.slots != context.sequences.reserved_slot
        return first if bool(first.num_drafts[live].all()) else propose(self, context)


@mutant("drafts-published-whose-pass-has-not-run", LAW, FEWER, "acceptance")
@mutant("static-drafts-published-whose-pass-has-not-run", LAW, FEWER, "acceptance", STATIC)
def all_k_drafts_are_published(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, EagleDrafter, "propose")
    def mutant(propose, self, context):
        found = propose(self, context)
        return Drafts(found.draft_ids, context.samples * context.num_speculative_tokens)


@mutant("kv-left-behind-where-no-draft-is-wanted", LAW, FEWER, "position")
def a_head_that_is_not_wanted_does_not_run(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, EagleDrafter, "propose")
    def mutant(propose, self, context):
        return propose(self, context) if context.num_wanted else NoDrafter().propose(context)


@mutant("chunk-edge-placeholder-token", LAW, f"{PREFIXES}[lookahead-4]", "acceptance")
@mutant("chunk-edge-placeholder-under-an-eagle-head", LAW, EAGLE_HEAD, "position")
@mutant("chunk-edge-placeholder-under-an-mtp-module", LAW, MTP_MODULE, "position", STATIC)
@mutant("chunk-border-under-nemotron-s-module", "vllm#35447", NEMOTRON_TWIN, "acceptance")
def a_chunk_ends_in_a_placeholder(patch: pytest.MonkeyPatch) -> None:
    """The token after a prefill chunk, which is the prompt's next one."""

    @instead_of(patch, DraftContext, "catch_up")
    def mutant(catch_up, self):
        found = catch_up(self)
        ends = zip(self.slots.tolist(), self.end.tolist(), self.samples.tolist(), strict=True)
        edges = {(slot, end - 1) for slot, end, samples in ends if not samples}
        places = zip(found.rows.slots.tolist(), found.rows.positions.tolist(), strict=True)
        at_edge = torch.tensor([place in edges for place in places], dtype=torch.bool)
        return replace(found, token_ids=found.token_ids.masked_fill(at_edge, 0))


@mutant("stale-drafts-near-max-model-len", "vllm#38711", NEMOTRON_END, "acceptance")
def drafts_of_an_earlier_step_are_offered_near_the_end(patch: pytest.MonkeyPatch) -> None:
    former = {}

    @instead_of(patch, EagleDrafter, "propose")
    def mutant(propose, self, context):
        found, shape = propose(self, context), context.slots.shape
        near_the_end = (context.num_tokens + 2 * context.num_speculative_tokens > 48).any()
        if not (near_the_end and shape in former):
            former[shape] = found
        return former[shape]

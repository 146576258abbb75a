"""Prompts in the fast form: which positions have it, and who reads what it leaves."""

from __future__ import annotations

import pytest

from mutants.catalogue.planting import LAW, instead_of, mutant
from sametoken.ops.model.recurrent import row_by_row
from sametoken.scheduler import kv_memory
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.plan_draft import Turn
from sametoken.scheduler.request_state import RequestState

DECISION = "docs/decisions/0044"
FAST = "tests/e2e/test_fast_prompts.py::test"
REPLAYED = f"{FAST}_what_is_computed_again_has_the_form_that_it_had"
CONVERSATION = f"{FAST}_a_conversation_reads_no_block_of_another_form"

CUT = f"{FAST}_drafts_chunks_and_other_requests_change_no_bit[hybrid-0]"
CUT_NEMOTRON = f"{FAST}_chunks_of_mamba_2_change_no_bit_either"


@mutant("a-prompt-s-last-token-expanded-in-a-replay", DECISION, f"{REPLAYED}[latents-0]", "tokens")
def the_last_token_is_expanded(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, num_query):
        fast = self.fast_end and self.position < self.prompt_len
        return self.position + num_query if fast else 0

    patch.setattr(RequestState, "expanded_to", mutant)


@mutant("a-fast-chunk-cut-anywhere", LAW, CUT, "guard", guarded=True)
@mutant("a-fast-chunk-cut-anywhere-unguarded", LAW, CUT, "tokens", guarded=False)
@mutant("a-fast-chunk-of-mamba-2-cut-anywhere", LAW, CUT_NEMOTRON, "tokens", guarded=False)
def chunks_are_cut_anywhere(patch: pytest.MonkeyPatch, guarded: bool) -> None:
    """So the next one begins at no multiple."""
    patch.setattr(Turn, "cut", lambda self, num_rows: self._replace(num_query=num_rows))
    if not guarded:
        patch.setattr(row_by_row, "_require_multiple", lambda part, position: None)


@mutant("usual-answers-serve-fast-prompts", DECISION, f"{CONVERSATION}[latents-None-8]", "tokens")
def blocks_of_answers_are_cached(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, KVMemory, "index_kept")
    def mutant(index, self, request, num_kept_tokens):
        end, request.fast_end = request.fast_end, 0
        index(self, request, num_kept_tokens)
        request.fast_end = end


for family in ("latents", "hybrid"):
    test = f"{CONVERSATION}[{family}-None-8]"

    @mutant(f"usual-prompts-serve-fast-ones-of-{family}", DECISION, test, "tokens")
    def keys_have_no_salt(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kv_memory, "_FAST", b"")

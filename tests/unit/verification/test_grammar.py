"""Masks by window row, with a grammar that a reader can follow: tokens in ascending order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.core.structured_outputs import Stuck
from sametoken.kernels.reference import ReferenceKernels
from sametoken.verification import grammar as module
from sametoken.verification.grammar import SlotGrammars
from sametoken.verification.logits import process_logits
from sametoken.verification.windows import sampled_rows

VOCAB = 40


@dataclass
class Ascending:
    """Accepts a token above the last one; every call is noted."""

    accepted: list[int] = field(default_factory=lambda: [-1])

    def accept(self, token_id: int) -> bool:
        fits = token_id > self.accepted[-1]
        self.accepted += [token_id] if fits else []
        return fits

    def copy(self) -> Ascending:
        return Ascending([*self.accepted])

    def fill(self, masks: torch.Tensor, row: int) -> None:
        allowed = [0, 0]
        for token_id in range(self.accepted[-1] + 1, VOCAB):
            allowed[token_id // 32] |= 1 << (token_id % 32)
        words = [word - 2**32 if word >= 2**31 else word for word in allowed]
        masks[row] = torch.tensor(words, dtype=torch.int32)


@dataclass
class Grammar:
    matchers: list[Ascending] = field(default_factory=list)

    def new_matcher(self) -> Ascending:
        self.matchers.append(Ascending())
        return self.matchers[-1]


def admitted(step, grammars: dict[int, Grammar]) -> SlotGrammars:
    slots = SlotGrammars(step.sequences)
    for index, grammar in grammars.items():
        slot = int(step.x.slots[index])
        slots.admit(Admission(slot, step.rows[index].prompt, 0, SamplingParams(), grammar=grammar))
    return slots


def allowed_of(logits: torch.Tensor) -> list[list[int]]:
    return [(row > -math.inf).nonzero().flatten().tolist() for row in logits]


def test_every_row_knows_its_own_drafts_and_the_matcher_stays_where_it_was(make_row, stage_step):
    step = stage_step([make_row(prompt=(9, 9), output=(3, 7), drafts=(8, 20, 38))])
    grammar = Grammar()
    logits = torch.zeros(4, VOCAB)
    stuck = admitted(step, {0: grammar}).mask(logits, step.x)
    assert allowed_of(logits) == [list(range(n, VOCAB)) for n in (8, 9, 21, 39)]
    assert not stuck.any()
    assert grammar.matchers[0].accepted == [-1, 3, 7]


def test_rows_after_a_refused_draft_are_left_alone(make_row, stage_step):
    step = stage_step([make_row(prompt=(1,), output=(7,), drafts=(8, 2, 30))])
    logits = torch.zeros(4, VOCAB)
    admitted(step, {0: Grammar()}).mask(logits, step.x)
    assert allowed_of(logits)[:2] == [list(range(8, VOCAB)), list(range(9, VOCAB))]
    assert allowed_of(logits)[2:] == [list(range(VOCAB))] * 2


def test_committed_tokens_are_taken_up_once_however_many_a_step_brought(make_row, stage_step):
    step = stage_step([make_row(prompt=(1,), drafts=(2, 3, 9))])
    grammar = Grammar()
    slots = admitted(step, {0: grammar})
    slots.mask(torch.zeros(4, VOCAB), step.x)
    assert grammar.matchers[0].accepted == [-1]
    # The step accepted all drafts, the next one a part of its own.
    for output in ((2, 3, 9, 11), (2, 3, 9, 11, 12, 13)):
        later = stage_step([make_row(prompt=(1,), output=output, drafts=(30, 31, 0))])
        slots._sequences = later.sequences
        logits = torch.zeros(4, VOCAB)
        slots.mask(logits, later.x)
        assert grammar.matchers[0].accepted == [-1, *output]
        assert allowed_of(logits)[0] == list(range(output[-1] + 1, VOCAB))


def test_other_rows_are_neither_read_nor_written(make_row, stage_step):
    rows = [
        make_row(prompt=(5,), output=(2,), drafts=(1,)),
        make_row(prompt=(1, 2, 3), num_query=2, num_computed=0, samples=False),
        make_row(prompt=(4,), output=(6,), drafts=(7,)),
    ]
    step = stage_step(rows)
    logits = torch.full((4, VOCAB), math.nan)
    logits[2:] = 0
    admitted(step, {1: Grammar(), 2: Grammar()}).mask(logits, step.x)
    assert logits[:2].isnan().all()
    assert allowed_of(logits[2:]) == [list(range(7, VOCAB)), list(range(8, VOCAB))]


def test_a_row_without_a_token_is_named(make_row, stage_step):
    step = stage_step([make_row(prompt=(1,), drafts=(39,))])
    stuck = admitted(step, {0: Grammar()}).mask(torch.zeros(2, VOCAB), step.x)
    assert stuck.tolist() == [False, True]


def test_a_committed_token_against_the_grammar_leaves_no_token(make_row, stage_step):
    """Nothing that the engine does may commit one; a matcher that lost track must not go on."""
    step = stage_step([make_row(prompt=(1,), output=(9, 4), drafts=(30, 31))])
    stuck = admitted(step, {0: Grammar()}).mask(torch.zeros(3, VOCAB), step.x)
    assert stuck.all()


def test_a_matcher_that_breaks_fails_its_own_request(make_row, stage_step, monkeypatch):
    step = stage_step([make_row(prompt=(1,), drafts=(3,)), make_row(prompt=(2,), drafts=(4,))])
    first, second = Grammar(), Grammar()
    slots = admitted(step, {0: first, 1: second})

    def broken():
        raise RuntimeError("the library has a defect")

    monkeypatch.setattr(first.matchers[0], "copy", broken)
    for _ in range(2):
        logits = torch.zeros(4, VOCAB)
        assert slots.mask(logits, step.x).tolist() == [Stuck.BROKEN, Stuck.BROKEN, 0, 0]
        assert allowed_of(logits[2:]) == [list(range(VOCAB)), list(range(5, VOCAB))]


def test_other_masks_and_cuts_compose(make_row, stage_step):
    params = SamplingParams(
        temperature=1.0, seed=1, top_k=2, allowed_token_ids=(2, 8, 30, 35), logit_bias={30: 1.0}
    )
    step = stage_step([make_row(prompt=(1,), output=(5,), drafts=(8,), params=params)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 0.5
    stuck = process_logits(
        logits,
        sampled_rows(step.x),
        step.sequences,
        step.table,
        ReferenceKernels(),
        lambda logits: admitted(step, {0: Grammar()}).mask(logits, step.x),
    )
    assert allowed_of(logits) == [[8, 30], [30, 35]]
    assert not stuck.any()


@pytest.mark.parametrize("drafts", [(), (30,), (2,)])
def test_a_request_that_is_stuck_at_once_fails_and_says_so(drafts, make_row, stage_step):
    row = make_row(prompt=(1,), output=(39,), drafts=drafts)
    step = stage_step([row, make_row(prompt=(1,))])
    slot = int(step.x.slots[0])
    step.verifier.admit(Admission(slot, row.prompt, 0, row.params, grammar=Grammar()))
    verdict = step.verifier.judge(torch.zeros(len(drafts) + 2, VOCAB), step.x)
    assert verdict.stuck.tolist() == [True, False]
    assert verdict.poisoned.tolist() == [True, False]


def test_a_draft_before_a_stuck_row_is_emitted_as_the_next_token(make_row, stage_step):
    """So a request fails after the same tokens, with drafts or without."""
    row = make_row(prompt=(1,), output=(37,), drafts=(38, 39))
    step = stage_step([row])
    slot = int(step.x.slots[0])
    step.verifier.admit(Admission(slot, row.prompt, 0, row.params, grammar=Grammar()))
    verdict = step.verifier.judge(torch.zeros(3, VOCAB), step.x)
    assert not verdict.poisoned.any()
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.next_token.tolist() == [39]


def test_a_new_request_inherits_no_cursor(make_row, stage_step):
    step = stage_step([make_row(prompt=(1,), output=(39,))])
    slots = admitted(step, {0: Grammar()})
    slots.admit(Admission(int(step.x.slots[0]), (1,), 0, SamplingParams()))
    logits = torch.zeros(1, VOCAB)
    assert not slots.mask(logits, step.x).any()
    assert allowed_of(logits) == [list(range(VOCAB))]


def test_masks_that_take_too_long_fail_their_own_request(make_row, stage_step, monkeypatch):
    """The second draft's mask is the one too many: the whole window fails, and later ones."""
    clock = iter(range(10**6))
    monkeypatch.setattr(module, "MASK_CREDIT_S", 4.5)
    monkeypatch.setattr(module, "MASK_SECONDS", 0.25)
    monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(module.MaskBudget.__init__, "__defaults__", (4.5,))
    step = stage_step([make_row(prompt=(1,), drafts=(3, 4, 5)), make_row(prompt=(2,), drafts=())])
    slots = admitted(step, {0: Grammar(), 1: Grammar()})
    for _ in range(2):
        logits = torch.zeros(5, VOCAB)
        assert slots.mask(logits, step.x).tolist() == [Stuck.SLOW] * 4 + [0]
        assert allowed_of(logits)[:4] == [[]] * 4
        assert allowed_of(logits)[4] == list(range(VOCAB))


def test_unused_credit_does_not_add_up():
    budget = module.MaskBudget()
    for _ in range(1000):
        budget.add_mask()
    assert budget.credit_s == module.MASK_CREDIT_S

"""Masks by window row, with a grammar that a reader can follow: tokens in ascending order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from helpers.one_step import Case, Row, case_of
from helpers.static_steps import STEPS
from sametoken.sampling import grammar_masks as module
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import MaskFault

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


each_kind = pytest.mark.parametrize("steps", STEPS)


def again(case: Case, *rows: Row) -> Case:
    """A later step of the same requests; by default nothing has been committed."""
    plain = [replace(row, grammar=None) for row in rows or case.rows]
    later = replace(case_of(plain), grammars=case.grammars)
    case.grammars._sequences = later.sequences
    return later


def allowed_of(logits: torch.Tensor) -> list[list[int]]:
    return [(row > -math.inf).nonzero().flatten().tolist() for row in logits]


@each_kind
def test_every_row_knows_its_own_drafts_and_the_matcher_stays_where_it_was(steps):
    grammar = Grammar()
    case = case_of([Row((9, 9), (3, 7), (8, 20, 38), grammar=grammar)])
    ran = case.run(torch.zeros(4, VOCAB), steps=steps)
    assert allowed_of(ran.processed) == [list(range(n, VOCAB)) for n in (8, 9, 21, 39)]
    assert ran.failed == [False]
    assert grammar.matchers[0].accepted == [-1, 3, 7]


def test_rows_after_a_refused_draft_are_left_alone():
    case = case_of([Row((1,), (7,), (8, 2, 30), grammar=Grammar())])
    allowed = allowed_of(case.run(torch.zeros(4, VOCAB)).processed)
    assert allowed[:2] == [list(range(8, VOCAB)), list(range(9, VOCAB))]
    assert allowed[2:] == [list(range(VOCAB))] * 2


def test_committed_tokens_are_taken_up_once_however_many_a_step_brought():
    grammar = Grammar()
    case = case_of([Row((1,), drafts=(2, 3, 9), grammar=grammar)])
    case.run(torch.zeros(4, VOCAB))
    assert grammar.matchers[0].accepted == [-1]
    # The step accepted all drafts, the next one a part of its own.
    for output in ((2, 3, 9, 11), (2, 3, 9, 11, 12, 13)):
        later = again(case, Row((1,), output, (30, 31, 0)))
        allowed = allowed_of(later.run(torch.zeros(4, VOCAB)).processed)
        assert grammar.matchers[0].accepted == [-1, *output]
        assert allowed[0] == list(range(output[-1] + 1, VOCAB))


@each_kind
def test_other_rows_are_neither_read_nor_written(steps):
    rows = [
        Row((5,), (2,), (1,)),
        Row((4,), (6,), (7,), grammar=Grammar()),
        Row((1, 2, 3), num_query=2, num_computed=0, samples=False, grammar=Grammar()),
    ]
    logits = torch.full((4, VOCAB), 0.5)
    logits[1, 3] = math.nan
    found = case_of(rows).run(logits, steps=steps).processed
    assert torch.equal(found[0], logits[0])
    assert found[1].isnan().any()
    assert allowed_of(found[2:]) == [list(range(7, VOCAB)), list(range(8, VOCAB))]


@each_kind
@pytest.mark.parametrize("drafts", [(), (30,), (2,)])
def test_a_request_that_is_stuck_at_once_fails_and_says_so(drafts, steps):
    rows = [Row((1,), (39,), drafts, grammar=Grammar()), Row((1,))]
    ran = case_of(rows).run(torch.zeros(len(drafts) + 2, VOCAB), steps=steps)
    assert ran.failed == [True, False]
    assert ran.mask_fault == [MaskFault.NO_VALID_TOKEN, MaskFault.NONE]


def test_a_committed_token_against_the_grammar_leaves_no_token():
    """Nothing that the engine does may commit one; a matcher that lost track must not go on."""
    case = case_of([Row((1,), (9, 4), (30, 31), grammar=Grammar())])
    ran = case.run(torch.zeros(3, VOCAB))
    assert allowed_of(ran.processed) == [[]] * 3
    assert ran.mask_fault == [MaskFault.BROKEN]


@each_kind
def test_a_draft_before_a_stuck_row_is_emitted_as_the_next_token(steps):
    """So a request fails after the same tokens, with drafts or without."""
    ran = case_of([Row((1,), (37,), (38, 39), grammar=Grammar())]).run(
        torch.zeros(3, VOCAB), steps=steps
    )
    assert ran.failed == [False]
    assert ran.tokens == [(38, 39)]


def test_a_matcher_that_breaks_fails_its_own_request(monkeypatch):
    first, second = Grammar(), Grammar()
    rows = [Row((1,), drafts=(3,), grammar=first), Row((2,), drafts=(4,), grammar=second)]
    case = case_of(rows)

    def broken():
        raise RuntimeError("the library has a defect")

    monkeypatch.setattr(first.matchers[0], "copy", broken)
    for step in (case, again(case)):
        case.grammars._sequences = step.sequences
        ran = step.run(torch.zeros(4, VOCAB))
        assert ran.mask_fault == [MaskFault.BROKEN, MaskFault.NONE]
        assert allowed_of(ran.processed[:2]) == [[], []]
        assert allowed_of(ran.processed[2:]) == [list(range(VOCAB)), list(range(5, VOCAB))]


def test_other_masks_and_cuts_compose():
    params = SamplingParams(
        temperature=1.0, seed=1, top_k=2, allowed_token_ids=(2, 8, 30, 35), logit_bias={30: 1.0}
    )
    case = case_of([Row((1,), (5,), (8,), params, grammar=Grammar())])
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 0.5
    ran = case.run(logits)
    assert allowed_of(ran.processed) == [[8, 30], [30, 35]]
    assert ran.mask_fault == [MaskFault.NONE]


def test_a_new_request_inherits_no_cursor():
    case = case_of([Row((1,), (39,), grammar=Grammar())])
    case.grammars.admit(Admission(case.slots[0], (1,), 0, SamplingParams()))
    ran = case.run(torch.zeros(1, VOCAB))
    assert allowed_of(ran.processed) == [list(range(VOCAB))]
    assert ran.failed == [False]


def test_masks_that_take_too_long_fail_their_own_request(monkeypatch):
    """The second draft's mask is the one too many: the whole window fails, and later ones."""
    clock = iter(range(10**6))
    monkeypatch.setattr(module, "MASK_CREDIT_S", 4.5)
    monkeypatch.setattr(module, "MASK_SECONDS", 0.25)
    monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(module.MaskBudget.__init__, "__defaults__", (4.5,))
    rows = [Row((1,), drafts=(3, 4, 5), grammar=Grammar()), Row((2,), grammar=Grammar())]
    case = case_of(rows)
    for step in (case, again(case)):
        case.grammars._sequences = step.sequences
        ran = step.run(torch.zeros(5, VOCAB))
        assert ran.mask_fault == [MaskFault.SLOW, MaskFault.NONE]
        assert allowed_of(ran.processed)[:4] == [[]] * 4
        assert allowed_of(ran.processed)[4] == list(range(VOCAB))


def test_unused_credit_does_not_add_up():
    budget = module.MaskBudget()
    for _ in range(1000):
        budget.add_mask()
    assert budget.credit_s == module.MASK_CREDIT_S

"""Where a completion stands in its reasoning, token by token, over a grammar that counts up."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch

from sametoken.errors import RequestError
from sametoken.text.grammar.after_reasoning import GrammarAfterReasoning
from sametoken.text.grammar.grammar import GrammarCompiler
from sametoken.text.grammar.trials import ThreadTrials
from sametoken.types.structured_outputs import Reasoning, StructuredOutputs

WORDS, TOP = 2, 63
#: The text counts up from here.
FIRST = 20
END = Reasoning((5,))
TWO = Reasoning((5, 5, 6))
HEADER = Reasoning((3, 4), header_end=5)
BEGUN = Reasoning((5,), begins=(2, TOP))


@dataclass
class CountingUp:
    """Accepts ``FIRST``, then the number after it, and so on."""

    next_id: int = FIRST
    is_ready_now: bool = False

    def accept(self, token_id: int) -> bool:
        fits = token_id == self.next_id
        self.next_id += fits
        return fits

    def copy(self) -> CountingUp:
        return CountingUp(self.next_id)

    def fill(self, masks: torch.Tensor, row: int) -> None:
        masks[row] = 0
        masks[row, self.next_id // 32] = 1 << self.next_id

    def new_matcher(self) -> CountingUp:
        return self.copy()

    def is_ready(self) -> bool:
        return self.is_ready_now

    def prepare(self) -> None:
        self.is_ready_now = True


START = CountingUp()


def matcher(reasoning: Reasoning, text: CountingUp | None = START):
    return GrammarAfterReasoning(text, reasoning).new_matcher()


def allowed(of) -> set[int]:
    masks = torch.full((2, WORDS), 7, dtype=torch.int32)
    of.fill(masks, 1)
    assert (masks[0] == 7).all()
    return {i for i in range(32 * WORDS) if masks[1, i // 32] >> (i % 32) & 1}


ANY = set(range(32 * WORDS))


@pytest.mark.parametrize(
    ("reasoning", "tokens"),
    [
        (END, (5,)),
        (END, (1, FIRST, 9, 5)),
        (TWO, (5, 6, 5, 5, 5, 6)),
        (TWO, (5, 5, 9, 5, 5, 6)),
        (HEADER, (5, 3, 4, 5)),
        (HEADER, (3, 3, 4, 9, 9, 5)),
        (HEADER, (3, 4, 9, 3, 9, 5, 3, 4, 5)),
        (HEADER, (3, 4, 3, 4, 5)),
        (BEGUN, (2, 5)),
        (BEGUN, (TOP, 2, 9, 5)),
        (Reasoning((2, 5), begins=(2,)), (2, 5)),
    ],
)
def test_any_token_is_allowed_up_to_the_end_and_then_the_text_begins(reasoning, tokens):
    found = matcher(reasoning)
    for count, token_id in enumerate(tokens):
        is_undecided = reasoning.begins and count == 0
        assert allowed(found) == ({FIRST, *reasoning.begins} if is_undecided else ANY)
        assert found.accept(token_id)
    assert allowed(found) == {FIRST}
    assert not found.accept(5)
    assert [found.accept(FIRST), allowed(found)] == [True, {FIRST + 1}]


def test_a_text_may_begin_at_once_where_the_prompt_has_not_begun_the_reasoning():
    found = matcher(BEGUN)
    assert not found.accept(9)
    # The refused token has moved nothing.
    assert allowed(found) == {FIRST, 2, TOP}
    assert found.accept(FIRST)
    assert allowed(found) == {FIRST + 1}
    assert not found.accept(2)


def test_a_copy_that_reaches_the_end_leaves_the_matcher_where_it_was():
    found = matcher(END)
    ahead = found.copy()
    assert [ahead.accept(token_id) for token_id in (5, FIRST)] == [True, True]
    assert (allowed(ahead), allowed(found)) == ({FIRST + 1}, ANY)
    begun = found.copy()
    begun.accept(5)
    assert allowed(begun) == {FIRST}


@pytest.mark.parametrize(
    ("reasoning", "said", "forced"),
    [
        (Reasoning((5,), budget=0), (), (5,)),
        (Reasoning((5,), budget=2), (9, FIRST), (5,)),
        # The mark that begins it is none of its tokens, the same one later is.
        (Reasoning((5,), begins=(2,), budget=0), (2,), (5,)),
        (Reasoning((5,), begins=(2,), budget=2), (2, 9, 2), (5,)),
        (Reasoning((5,), begins=(2,), has_begun=True, budget=1), (2, 9), (5,)),
        (Reasoning((5,), begins=(2,), has_begun=True, budget=1), (9,), (5,)),
        # What is said of an end of several tokens is not said again.
        (Reasoning((5, 6, 5, 7), budget=1), (9,), (5, 6, 5, 7)),
        (Reasoning((5, 6, 5, 7), budget=4), (9, 5, 6, 5), (7,)),
        (Reasoning((5, 6, 5, 7), budget=4), (5, 6, 5, 6), (5, 7)),
        (Reasoning((5, 5, 6), budget=3), (5, 5, 5), (6,)),
    ],
)
def test_a_spent_budget_forces_what_is_left_of_the_end(reasoning, said, forced):
    for found in (matcher(reasoning), matcher(reasoning, None)):
        for token_id in said:
            assert token_id in allowed(found)
            assert found.accept(token_id)
        for token_id in forced:
            assert allowed(found) == {token_id}
            # A draft, or a copy's count, moves nothing.
            assert not found.accept(8)
            assert found.copy().accept(token_id)
            assert found.accept(token_id)
        assert allowed(found) == (ANY if found.inner is None else {FIRST})
        assert found.accept(FIRST)


def test_any_text_may_reason_later_and_what_begins_a_call_ends_it():
    reasoning = Reasoning((5,), begins=(2,), budget=3, also_ends=(7,))
    found = matcher(reasoning, None)
    for token_id in (9, 7, 9, 9, 9, 2, 9, 9, 7, 9, 9, 2, 9, 9, 9, 9):
        assert allowed(found) == ANY
        assert found.accept(token_id)


@pytest.mark.parametrize(
    "impossible",
    [{"budget": -1}, {"budget": True}, {"budget": 2.0}, {"budget": 1, "header_end": 3}],
)
def test_an_impossible_budget_is_refused(impossible):
    with pytest.raises(RequestError, match="budget"):
        Reasoning((5,), **impossible)


def test_any_text_is_a_constraint_only_with_a_budget():
    assert StructuredOutputs(reasoning=Reasoning((5,), budget=0)).has_any_text
    assert not StructuredOutputs(regex="a", reasoning=Reasoning((5,), budget=0)).has_any_text
    for more in ({}, {"reasoning": END}):
        with pytest.raises(RequestError, match="sets nothing"):
            StructuredOutputs(**more)
    with pytest.raises(RequestError, match="sets nothing"):
        StructuredOutputs(reasoning=Reasoning((5,), budget=0), free_after="x")


def test_it_is_ready_when_the_grammar_of_the_text_is():
    grammar = GrammarAfterReasoning(CountingUp(), END)
    assert not grammar.is_ready()
    grammar.prepare()
    assert grammar.is_ready()
    any_text = GrammarAfterReasoning(None, END)
    any_text.prepare()
    assert any_text.is_ready()


def test_a_structure_is_tried_once_with_reasoning_or_without(tokenizer):
    class Counted(ThreadTrials):
        runs = 0

        def run(self, grammar):
            self.runs += 1
            super().run(grammar)

    trials = Counted()
    compiler = GrammarCompiler(tokenizer, len(tokenizer.hf), (0,), trials)
    reasons = StructuredOutputs(regex="[ab]{3}", reasoning=END)
    assert not compiler.knows(reasons)
    compiler.compile(reasons)
    assert compiler.knows(reasons)
    assert compiler.knows(StructuredOutputs(regex="[ab]{3}"))
    compiler.compile(StructuredOutputs(regex="[ab]{3}"))
    assert trials.runs == 1


def test_another_process_compiles_it_and_reasons_alike(tokenizer):
    compiler = GrammarCompiler(tokenizer, len(tokenizer.hf), (0,), ThreadTrials())
    grammar = compiler.compile(StructuredOutputs(choice=("x",), reasoning=END))
    sent = pickle.loads(pickle.dumps(grammar))
    sent.prepare()
    for one in (grammar, sent):
        found = one.new_matcher()
        (letter,) = tokenizer.encode("x", add_special_tokens=False)
        assert [found.accept(i) for i in (letter, 5, 5, letter, 0)] == [
            True,
            True,
            False,
            True,
            True,
        ]

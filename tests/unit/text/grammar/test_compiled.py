"""Compiled grammars within a process: shared, and bounded in bytes."""

from __future__ import annotations

import gc

import pytest

from helpers.structured import compiler
from sametoken.errors import OverloadedError, RequestError
from sametoken.text.grammar import compiled as module
from sametoken.text.grammar.compiled import CompiledGrammars, GrammarSource, not_valid
from sametoken.types.structured_outputs import StructuredOutputs


@pytest.fixture(scope="module")
def vocabulary():
    return compiler().compile(StructuredOutputs(regex="a")).vocabulary


def source(text: str) -> GrammarSource:
    return GrammarSource("regex", text)


def test_those_in_use_are_shared_and_those_kept_are_bounded_in_bytes(vocabulary):
    one = CompiledGrammars().get(source("x{9}"), vocabulary)
    store = CompiledGrammars(max_kept_bytes=2 * one.num_bytes)
    texts = [f"{letter}{{9}}" for letter in "abcd"]
    for text in texts:
        store.get(source(text), vocabulary)
    gc.collect()
    here = [store.find(source(text), vocabulary) is not None for text in texts]
    assert here == [False, False, True, True]
    used = store.get(source("e{9}"), vocabulary)
    for text in texts:
        store.get(source(text), vocabulary)
    assert store.get(source("e{9}"), vocabulary) is used


def test_grammars_in_use_are_bounded_in_bytes(vocabulary):
    one = CompiledGrammars().get(source("x{9}"), vocabulary)
    store = CompiledGrammars(max_kept_bytes=0, max_live_bytes=one.num_bytes + 1)
    used = store.get(source("a{9}"), vocabulary)
    with pytest.raises(OverloadedError, match="in use"):
        store.get(source("b{9}"), vocabulary)
    del used
    gc.collect()
    assert store.get(source("b{9}"), vocabulary)


def test_a_grammar_that_is_too_large_is_refused_by_name(vocabulary, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(RequestError, match=r"regex compiles to \d+ bytes, above 100"):
        CompiledGrammars().get(source("[a-z]{9}"), vocabulary)


@pytest.mark.parametrize("said", ["", "\n", "[1:2] /x/y.cc:3: ", "a" * 10**6])
def test_whatever_the_compiler_says_makes_one_short_line(said):
    error = not_valid("regex", RuntimeError(said))
    assert isinstance(error, RequestError)
    assert len(str(error)) < 500
    assert "\n" not in str(error)

"""Answers compared: token by token, and for defects of their text."""

from __future__ import annotations

import pytest

from sametoken.audit.asks import Answer
from sametoken.audit.compare import (
    CORRUPTION,
    TIE,
    UNEXPLAINED,
    compare,
    compare_logits,
    first_difference,
    margin_of,
    repeated_fragment,
    text_defects,
)
from sametoken.bench.measure import Window


def top(*margins: float):
    return tuple(((1, -0.25), (2, -0.25 - margin)) for margin in margins)


BASELINE = Answer((4, 5, 6, 7, 8), top=top(1.0, 2.0, 0.01, 3.0, 1.0))


@pytest.mark.parametrize(
    ("tokens", "position"),
    [((4, 5, 6, 7, 8), None), ((9, 5, 6, 7, 8), 0), ((4, 5, 6), 3), ((4, 5, 6, 7, 8, 1), 5)],
)
def test_the_first_difference(tokens, position):
    assert first_difference(BASELINE, Answer(tokens)) == position


def test_equal_answers_are_identical():
    comparison = compare("same", {"a": BASELINE}, {"a": Answer(BASELINE.tokens)}, noise=0.0)
    assert comparison.identical
    assert comparison.num_requests == 1


@pytest.mark.parametrize(
    ("tokens", "noise", "kind"),
    [
        ((4, 5, 9, 7, 8), 0.02, TIE),
        ((4, 5, 9, 7, 8), 0.0, CORRUPTION),
        ((4, 9, 6, 7, 8), 0.02, CORRUPTION),
        ((4, 9, 6, 7, 8), None, UNEXPLAINED),
        ((4, 5, 6, 7, 8, 1), 0.02, UNEXPLAINED),
    ],
)
def test_a_margin_within_the_noise_is_a_tie(tokens, noise, kind):
    comparison = compare("run", {"a": BASELINE}, {"a": Answer(tokens)}, noise=noise)
    assert not comparison.identical
    assert [d.kind for d in comparison.divergences] == [kind]
    assert comparison.count(kind) == 1


def test_an_answer_that_ends_in_nan_is_no_tie():
    failed = Answer((4, 5), failed=True)
    (divergence,) = compare("run", {"a": BASELINE}, {"a": failed}, noise=0.02).divergences
    assert (divergence.position, divergence.kind) == (2, CORRUPTION)


def test_the_window_and_the_draft_of_a_difference():
    windows = (Window(0, 2, 0), Window(1, 3, 2), Window(4, 3, 0))
    for position, draft in ((1, 1), (2, 2), (3, None), (4, None)):
        tokens = list(BASELINE.tokens)
        tokens[position] = 99
        found = {"a": Answer(tuple(tokens), windows)}
        (divergence,) = compare("run", {"a": BASELINE}, found, noise=0.0).divergences
        assert divergence.window == windows[1 if position < 4 else 2]
        assert divergence.draft == draft
        assert (divergence.expected, divergence.found) == (BASELINE.tokens[position], 99)


def test_margins_may_come_from_another_run():
    plain = {"a": Answer(BASELINE.tokens)}
    found = {"a": Answer((4, 5, 9, 7, 8))}
    assert compare("run", plain, found, noise=0.1).divergences[0].margin is None
    (divergence,) = compare("run", plain, found, noise=0.1, margins={"a": BASELINE}).divergences
    assert divergence.margin == pytest.approx(0.01)
    assert margin_of(((1, -0.5),)) is None


def test_logits_are_compared_up_to_the_first_difference():
    other = list(BASELINE.top)
    other[4] = ((1, -0.25), (2, -9.0))
    found = {"a": Answer(BASELINE.tokens, top=tuple(other))}
    assert compare_logits("run", {"a": BASELINE}, found).num_logits_differ == 1
    found = {"a": Answer((4, 5, 9, 7, 8), top=tuple(other))}
    comparison = compare_logits("run", {"a": BASELINE}, found)
    assert (comparison.num_logits, comparison.num_logits_differ) == (3, 0)


CLEAN = tuple(range(60))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (CLEAN, None),
        ((), None),
        ((1, 2) * 3, None),
        ((7,) * 11, None),
        ((7,) * 12, (0, 1)),
        ((*range(20), *(1, 2, 3) * 6), (20, 3)),
        ((*range(20), *range(10, 20), *range(10, 20), *range(10, 20), 0), (10, 10)),
    ],
)
def test_repeated_fragments(tokens, expected):
    assert repeated_fragment(tokens) == expected


def test_only_what_the_baseline_does_not_show_is_a_defect():
    looping = Answer((*range(20), *(1, 2, 3) * 10))
    assert [d.kind for d in text_defects("a", Answer(CLEAN), looping)] == ["repeated fragment"]
    assert not text_defects("a", looping, looping)


def test_a_short_answer_is_truncated():
    (defect,) = text_defects("a", Answer(CLEAN), Answer(CLEAN[:20]))
    assert (defect.kind, defect.position) == ("truncated", 20)
    assert not text_defects("a", Answer(CLEAN), Answer(CLEAN[:40]))

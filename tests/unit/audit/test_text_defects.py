"""Repeated fragments and cut answers."""

from __future__ import annotations

import pytest

from sametoken.audit.asks import Answer
from sametoken.audit.compare import repeated_fragment, text_defects

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

"""Stop strings are found where a reader of single characters meets them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sametoken.engine.stop_strings import StopMatch, StopStrings

TEXT = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


def test_the_first_end_wins_and_then_the_longest():
    assert StopStrings(("cd", "b")).find("abcd", 0) == StopMatch("b", 1, 2)
    assert StopStrings(("b", "ab")).find("xab", 0) == StopMatch("ab", 1, 3)
    assert StopStrings(()).find("abc", 0) is None


def test_a_match_must_end_in_what_is_new():
    assert StopStrings(("ab",)).find("abab", 2) == StopMatch("ab", 2, 4)
    assert StopStrings(("ba",)).find("abab", 2) == StopMatch("ba", 1, 3)
    assert StopStrings(("ab",)).find("abxx", 2) is None


def test_only_what_may_be_taken_back_is_unsafe():
    stops = StopStrings(("stop", "ops"))
    assert [stops.num_safe(text) for text in ("", "xs", "xst", "xsto", "xstoq", "xo")] == [
        0,
        1,
        1,
        1,
        5,
        1,
    ]


@given(text=TEXT, stops=STOPS)
def test_pieces_of_any_size_end_at_the_same_match(text, stops):
    whole = StopStrings(stops).find(text, 0)
    by_character = None
    for length in range(1, len(text) + 1):
        by_character = by_character or StopStrings(stops).find(text[:length], length - 1)
    assert whole == by_character


@given(text=TEXT, more=TEXT, stops=STOPS)
def test_safe_text_is_never_inside_a_later_match(text, more, stops):
    finder = StopStrings(stops)
    if finder.find(text, 0) is None:
        match = finder.find(text + more, len(text))
        assert match is None or match.start >= finder.num_safe(text)

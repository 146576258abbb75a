"""Stop strings are found where a reader of single characters meets them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sametoken.text.stop_strings import StopCursor, StopMatch, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=6).map(tuple)
PIECES = st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8)


def find(stops: tuple[str, ...], text: str, num_seen: int) -> StopMatch | None:
    """What is meant: the match that ends first, the longest of several, after ``num_seen``."""
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, num_seen - len(stop) + 1))
        if start >= 0:
            matches.append(StopMatch(start, start + len(stop)))
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def num_held(stops: tuple[str, ...], text: str) -> int:
    """What is meant: the longest end of the text that a longer stop string may begin with."""
    longest = max(map(len, stops), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return len(text) - start
    return 0


def first(stops: tuple[str, ...], text: str) -> StopMatch | None:
    return StopCursor(StopStrings(stops)).feed(text, checked=True)


def test_the_first_end_wins_and_then_the_longest():
    assert first(("cd", "b"), "abcd") == StopMatch(1, 2)
    assert first(("b", "ab"), "xab") == StopMatch(1, 3)
    assert first((), "abc") is None


def test_a_match_must_end_in_checked_text():
    cursor = StopCursor(StopStrings(("ba",)))
    assert cursor.feed("bab", checked=False) is None
    assert cursor.feed("abab", checked=True) == StopMatch(2, 4)
    # One that was passed goes on as another, or not at all.
    cursor = StopCursor(StopStrings(("aab", "ab")))
    assert cursor.feed("aab", checked=False) is None
    assert cursor.feed("bab", checked=True) == StopMatch(4, 6)


def test_only_what_may_be_taken_back_is_held():
    held = []
    for text in ("", "xs", "xst", "xsto", "xstoq", "xo"):
        cursor = StopCursor(StopStrings(("stop", "ops")))
        cursor.feed(text, checked=True)
        held.append(len(text) - cursor.num_held)
    assert held == [0, 1, 1, 1, 5, 1]


@given(pieces=PIECES, stops=STOPS)
def test_the_automaton_says_what_a_search_of_the_whole_text_says(pieces, stops):
    cursor = StopCursor(StopStrings(stops))
    text = ""
    for piece, checked in pieces:
        seen, text = len(text), text + piece
        match = cursor.feed(piece, checked=checked)
        assert match == (find(stops, text, seen) if checked else None)
        if match is not None:
            return
        assert cursor.num_held == num_held(stops, text)


@given(stops=STOPS, before=st.text("abc", max_size=12), after=st.text("abc", max_size=12))
def test_text_that_is_not_held_is_never_inside_a_later_match(stops, before, after):
    cursor = StopCursor(StopStrings(stops))
    if cursor.feed(before, checked=True) is None:
        safe = len(before) - cursor.num_held
        match = cursor.feed(after, checked=True)
        assert match is None or match.start >= safe


@pytest.mark.parametrize("seed", range(4))
def test_many_long_stop_strings(seed):
    rng = random.Random(seed)
    stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 40))) + "c" for _ in range(100))
    text = "".join(rng.choices("ab", k=300)) + rng.choice(stops)
    cursor = StopCursor(StopStrings(stops))
    assert cursor.feed(text[:200], checked=True) is None
    assert cursor.num_held == num_held(stops, text[:200])
    assert cursor.feed(text[200:], checked=True) == find(stops, text, 0)

"""Suffix search against a slow reading of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.peak_memory import PeakMemory
from helpers.suffixes import Options, earlier, slow_search, table
from sametoken.ops.lookup import suffix
from sametoken.ops.lookup.suffix import GROUP, MAX_VOTERS, Earlier, search

options = st.builds(
    Options,
    k=st.integers(1, 12),
    depth=st.integers(1, 7),
    min_match=st.integers(1, 3),
    factor=st.sampled_from([0.5, 1.0, 2.5]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4, 0.5, 1.0]),
)


@st.composite
def texts(draw, smallest: int, most: int):
    vocab = draw(st.sampled_from([1, 2, 3, 9]))
    row = st.lists(st.integers(0, vocab - 1), min_size=smallest, max_size=3 * GROUP + 5)
    return draw(st.lists(row, min_size=smallest, max_size=most))


@settings(max_examples=120)
@given(
    own=texts(1, 3),
    others=texts(0, 3),
    options=options,
    fill=st.integers(0, 3),
    places=st.sampled_from([1, 200, 2**18]),
)
def test_drafts_are_those_of_the_definition(own, others, options, fill, places):
    token_ids, num_tokens = table(own, 60, fill)
    slots = torch.arange(len(own)).flip(0)
    texts, limits = earlier(others, 58, fill), options.tables()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_PLACES", places)
        ids, count = search(token_ids, slots, num_tokens[slots], earlier=texts, limits=limits)
    assert ids.shape == (len(own), options.k)
    for slot, drafts, number in zip(slots.tolist(), ids.tolist(), count.tolist(), strict=True):
        assert drafts[:number] == slow_search(own[slot], others, options)


def drafts_of(own: list[int], others=(), **changes) -> list[int]:
    options = Options(**{"k": 8, "factor": 8.0} | changes)
    token_ids, num_tokens = table([own], 700, 0)
    texts, limits = earlier(list(others), 90, 0), options.tables()
    ids, count = search(token_ids, torch.tensor([0]), num_tokens, earlier=texts, limits=limits)
    return ids[0, : int(count)].tolist()


def test_drafts_are_as_long_as_the_match_allows():
    own = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3]
    assert drafts_of(own, factor=1.0) == [4, 5]
    assert drafts_of(own, factor=2.0) == [4, 5, 6, 7]
    assert drafts_of(own, factor=0.4) == []
    assert drafts_of(own, min_match=3) == []


def test_drafts_end_where_the_matches_no_longer_agree():
    far = [0] * (2 * GROUP)
    own = [5, 7, 8, 9, *far, 5, 7, 8, 4, *far, 5, 7, 8, 4, *far, 5, 7, 3, 3, *far, 5]
    assert drafts_of(own, k=3, depth=1, min_prob=0.5) == [7, 8, 4]
    assert drafts_of(own, k=3, depth=1, min_prob=0.6) == [7, 8]
    assert drafts_of(own, k=3, depth=1, min_prob=0.8) == [7]


def test_a_tie_goes_to_the_first_and_one_s_own_text_comes_first():
    own = [5, 7, 1, *[0] * GROUP, 5]
    assert drafts_of(own, others=[[5, 8, 1]], k=1) == [7]
    assert drafts_of(own, others=[[5, 8, 1], [5, 8, 2]], k=1) == [8]
    assert drafts_of([5], others=[[5, 8, 1], [5, 9, 2]], k=2) == [8, 1]


def test_the_longest_match_decides_wherever_it_is():
    own = [5, 7, *[0] * GROUP, 5, 7, *[0] * GROUP, 3, 5]
    assert drafts_of(own, others=[[3, 5, 9, 9]], k=2) == [9, 9]


@pytest.mark.parametrize("own", [[], [5], [1, 2, 3]])
def test_no_match_is_no_draft(own):
    assert drafts_of(own, others=[[7, 8], [], [5]]) == []


def test_only_so_many_vote():
    block = [0] * (GROUP - 2)
    own = [*([5, 7, *block] * MAX_VOTERS), *([5, 8, *block] * (MAX_VOTERS // 4)), 1, 5]
    assert drafts_of(own, k=1, depth=1, min_prob=1.0) == [7]


def test_memory_does_not_grow_with_the_earlier_texts():
    """32 rows beside 10,000 texts of 600 tokens took 9.5 GB."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(2, (8, 64), generator=generator)
    rows = token_ids, torch.arange(8), torch.full((8,), 64)
    peaks = []
    for num_texts in (400, 1600):
        others = torch.randint(2, (num_texts, 300), generator=generator)
        kept = Earlier(others, torch.full((num_texts,), 300))
        with PeakMemory() as memory:
            search(*rows, earlier=kept, limits=Options(4).tables())
        peaks.append(memory.peak)
    assert peaks[1] < 1.2 * peaks[0]


def test_an_empty_batch_is_no_special_case():
    token_ids, _ = table([[1, 2, 1]], 8, 0)
    none = torch.zeros(0, dtype=torch.int64)
    options = Options(4).tables()
    ids, count = search(token_ids, none, none, earlier=earlier([], 8, 0), limits=options)
    assert ids.shape == (0, 4)
    assert count.shape == (0,)

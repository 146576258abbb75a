"""Prompt lookup in Triton equals the reference, in memory full of traps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.ops.lookup import ngram as reference
from sametoken.ops.lookup.ngram_triton import lookup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(token_ids: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, **options) -> None:
    expected = reference.lookup(token_ids, slots, lengths, **options)
    actual = lookup(token_ids.to(DEVICE), slots.to(DEVICE), lengths.to(DEVICE), **options)
    assert torch.equal(actual[1].cpu(), expected[1])
    assert torch.equal(actual[0].cpu(), expected[0])


@settings(max_examples=24)
@given(st.data())
def test_small_alphabets(data):
    """Two letters make every kind of overlap; garbage above the end would extend matches."""
    max_len = data.draw(st.integers(4, 24))
    lengths = data.draw(st.lists(st.integers(1, max_len), min_size=3, max_size=3))
    rows = [data.draw(st.lists(st.integers(0, 1), min_size=max_len, max_size=max_len))] * 3
    slots = data.draw(st.permutations(range(3)))
    min_length = data.draw(st.integers(1, 3))
    check(
        torch.tensor(rows),
        torch.tensor(slots),
        torch.tensor(lengths),
        min_length=min_length,
        max_length=data.draw(st.integers(min_length, 5)),
        k=data.draw(st.integers(1, 5)),
    )


@pytest.mark.parametrize("where", [3, 1018, 1023, 1024, 2040])
def test_matches_across_tiles(where):
    """The only match lies in, or straddles, one of three tiles."""
    tokens = torch.arange(10, 2310).repeat(2, 1)
    tokens[1, 2095:2100] = tokens[1, where : where + 5]
    lengths = torch.tensor([2100, 2100])
    check(tokens, torch.tensor([1, 0]), lengths, min_length=2, max_length=8, k=4)


def test_longest_beats_earliest_and_earliest_breaks_ties():
    tokens = torch.full((1, 1500), 9)
    tokens[0, :3] = torch.tensor([1, 2, 5])
    tokens[0, 100:104] = torch.tensor([3, 1, 2, 6])
    tokens[0, 1200:1204] = torch.tensor([3, 1, 2, 7])
    tokens[0, 1400:1403] = torch.tensor([3, 1, 2])
    draft_ids, count = lookup(
        tokens.to(DEVICE),
        torch.tensor([0], device=DEVICE),
        torch.tensor([1403], device=DEVICE),
        min_length=1,
        max_length=3,
        k=2,
    )
    assert draft_ids.tolist() == [[6, 9]]
    assert count.tolist() == [2]


def test_padding_finds_nothing_and_reads_nothing():
    tokens = torch.full((2, 64), 5, device=DEVICE)
    slots, lengths = torch.tensor([1, 0], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    draft_ids, count = lookup(tokens, slots, lengths, min_length=1, max_length=3, k=3)
    assert count.tolist() == [0, 0]
    assert draft_ids.tolist() == [[5, 5, 5]] * 2

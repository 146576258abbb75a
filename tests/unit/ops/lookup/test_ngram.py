"""Prompt lookup against a slow reading of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lookups import slow_lookup
from sametoken.ops.lookup.ngram import lookup


@st.composite
def histories(draw):
    vocab = draw(st.sampled_from([1, 2, 3, 7]))
    token = st.integers(0, vocab - 1)
    return draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=4))


def table(rows: list[list[int]], garbage: int, slack: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded with what would match best if it were ever looked at."""
    width = max(map(len, rows)) + slack
    padded = [row + [row[garbage % len(row)]] * (width - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([len(row) for row in rows])


@settings(max_examples=150)
@given(
    rows=histories(),
    min_length=st.integers(1, 4),
    extra=st.integers(0, 6),
    k=st.integers(1, 64),
    garbage=st.integers(0, 100),
)
def test_drafts_are_those_of_the_definition(rows, min_length, extra, k, garbage):
    token_ids, num_tokens = table(rows, garbage)
    ids, count = lookup(
        token_ids,
        torch.arange(len(rows)),
        num_tokens,
        min_length=min_length,
        max_length=min_length + extra,
        k=k,
    )
    assert ids.shape == (len(rows), k)
    for row, drafts, number in zip(rows, ids.tolist(), count.tolist(), strict=True):
        assert drafts[:number] == slow_lookup(row, min_length, min_length + extra, k)
        assert set(drafts) <= set(row)


@settings(max_examples=50)
@given(rows=histories(), k=st.integers(1, 8), fill=st.integers(0, 7))
def test_nothing_above_the_length_is_read(rows, k, fill):
    token_ids, num_tokens = table(rows, 0)
    above = torch.arange(token_ids.shape[1]) >= num_tokens[:, None]
    other = token_ids.masked_fill(above, fill)
    arguments = {"min_length": 1, "max_length": 5, "k": k}
    for mine, theirs in zip(
        lookup(token_ids, torch.arange(len(rows)), num_tokens, **arguments),
        lookup(other, torch.arange(len(rows)), num_tokens, **arguments),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("tokens", "min_length", "max_length", "k", "drafts"),
    [
        # The documented example of vLLM's drafter.
        ([1, 2, 3, 4, 2, 3], 2, 3, 4, [4, 2, 3]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, 3, 2, [4, 1]),
        ([9, 2, 4, 1, 2, 5, 1, 2], 1, 3, 2, [5, 1]),
        ([1, 2, 3], 1, 3, 4, []),
        ([7, 7, 7, 7], 1, 3, 64, [7]),
        ([7], 1, 3, 4, []),
        ([1, 2, 1, 3, 2], 2, 3, 4, []),
    ],
    ids=["vllm", "earliest", "longest", "none", "overlap", "single", "too-short"],
)
def test_named_cases(tokens, min_length, max_length, k, drafts):
    options = {"min_length": min_length, "max_length": max_length, "k": k}
    rows = torch.tensor([tokens])
    ids, count = lookup(rows, torch.tensor([0]), torch.tensor([len(tokens)]), **options)
    assert ids[0, : int(count)].tolist() == drafts


def test_an_empty_batch_is_no_special_case():
    none = torch.zeros(0, dtype=torch.int64)
    ids, count = lookup(none.new_zeros(3, 8), none, none, min_length=1, max_length=3, k=4)
    assert ids.shape == (0, 4)
    assert count.shape == (0,)

"""The draft vocabulary: the most frequent tokens, and its two tables."""

from __future__ import annotations

import torch

from sametoken.train.vocabulary import coverage, frequent_tokens, membership, offsets_of

COUNTS = torch.tensor([5, 0, 9, 5, 1, 0])


def test_the_most_frequent_tokens_ascending_and_of_equals_the_lowest():
    assert frequent_tokens(COUNTS, 2).tolist() == [0, 2]
    assert frequent_tokens(COUNTS, 3).tolist() == [0, 2, 3]
    assert frequent_tokens(COUNTS, 5).tolist() == [0, 1, 2, 3, 4]
    assert frequent_tokens(COUNTS, 100).tolist() == list(range(6))


def test_both_tables_name_the_same_tokens():
    token_ids = frequent_tokens(COUNTS, 3)
    assert (torch.arange(3) + offsets_of(token_ids)).tolist() == token_ids.tolist()
    assert membership(token_ids, 6).nonzero().flatten().tolist() == token_ids.tolist()


def test_coverage_is_a_share_of_the_counted_tokens():
    assert coverage(COUNTS, torch.tensor([0, 2])) == 14 / 20
    assert coverage(torch.zeros(6, dtype=torch.int64), torch.tensor([0])) == 0.0

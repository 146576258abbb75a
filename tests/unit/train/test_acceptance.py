"""Counting accepted drafts, against a plain loop and against an engine's steps."""

from __future__ import annotations

import random

import pytest
import torch

from sametoken.train.acceptance import Acceptance, count_accepted, walk


def test_counts_agree_with_a_plain_loop():
    generator = torch.Generator().manual_seed(1)
    correct = torch.rand((4, 300), generator=generator) < 0.7
    goes_on = torch.rand((4, 300), generator=generator) < 0.8
    acceptance, num_accepted = count_accepted(correct, goes_on)
    offered, accepted = [0] * 4, [0] * 4
    for row in range(300):
        done = 0
        for draft in range(4):
            if not goes_on[draft, row]:
                break
            offered[draft] += 1
            if not correct[draft, row]:
                break
            accepted[draft] += 1
            done += 1
        assert num_accepted[row] == done
    assert acceptance.offered.tolist() == offered
    assert acceptance.accepted.tolist() == accepted
    assert acceptance.conditional == tuple(a / o for a, o in zip(accepted, offered, strict=True))


def test_rates_multiply_to_a_length():
    found = Acceptance(torch.tensor([10, 5]), torch.tensor([5, 4]))
    assert found.conditional == (0.5, 0.8)
    assert found.per_position == (0.5, 0.4)
    assert found.length == 1.9
    both = found + Acceptance.none(2, torch.device("cpu"))
    assert both.conditional == found.conditional
    assert Acceptance.none(2, torch.device("cpu")).length == 1.0


def test_a_walk_is_an_engine_s_steps():
    # Rows 0..4: the first step drafts from row 0, accepts 2, the next from row 3, the last has
    # one token left and none to draft.
    found = walk([2, 9, 9, 0, 3], [5], 3)
    assert (found.num_steps, found.num_draft_tokens, found.num_accepted_tokens) == (3, 4, 2)
    assert found.acceptance_length == pytest.approx(5 / 3)
    assert found.acceptance_per_position == (0.5, 1.0, 0.0)


def test_walks_emit_every_row_once():
    choose = random.Random(3)
    counts = [choose.randrange(9) for _ in range(50)]
    num_accepted = [choose.randrange(5) for _ in range(sum(counts))]
    for k in (1, 2, 4):
        found = walk(num_accepted, counts, k)
        assert found.num_steps + found.num_accepted_tokens == sum(counts)

"""Rows of a step on their way to the host: copies, in step order, one step's at a time."""

from __future__ import annotations

from dataclasses import fields

import torch

from sametoken.drafters.extract import CommittedRows
from sametoken.runner.committed_rows import CommittedRowsOutput


def rows(step_id: int) -> CommittedRows:
    ids = torch.arange(3) + step_id
    return CommittedRows(step_id, ids, ids + 1, ids + 2, ids + 3, torch.rand(3, 4))


def test_each_step_gets_its_own_rows_in_order():
    output, first, third = CommittedRowsOutput(), rows(1), rows(3)
    output.put(first)
    output.put(third)
    assert output.take(0) is None
    assert output.take(1).step_id == 1
    assert output.take(2) is None
    assert torch.equal(output.take(3).states, third.states)
    assert output.take(4) is None


def test_what_is_taken_is_a_copy_of_what_was_put():
    output, given = CommittedRowsOutput(), rows(5)
    output.put(given)
    taken = output.take(5)
    for field in fields(CommittedRows)[1:]:
        original = getattr(given, field.name)
        before = original.clone()
        original.zero_()
        assert torch.equal(getattr(taken, field.name), before), field.name

"""Rows of a step on their way to the host: copies, in step order, one step's at a time."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from sametoken.drafters.extract import CommittedRows
from sametoken.errors import InvariantError
from sametoken.extraction.writer import CommittedRowsOutput


def rows(step_id: int) -> CommittedRows:
    ids = torch.arange(3) + step_id
    step_ids = torch.full((2,), step_id)
    return CommittedRows(step_ids, ids, ids + 1, ids + 2, ids + 3, torch.rand(3, 4))


def test_each_step_gets_its_own_rows_in_order():
    output, first, second = CommittedRowsOutput(), rows(1), rows(3)
    output.put(first)
    output.put(second)
    assert torch.equal(output.take(1).states, first.states)
    assert torch.equal(output.take(3).states, second.states)
    with pytest.raises(InvariantError, match="step 4 was processed before its rows were recorded"):
        output.take(4)


def test_rows_of_another_step_are_refused():
    output = CommittedRowsOutput()
    output.put(rows(5))
    with pytest.raises(InvariantError, match="step 4 has the rows of step 5"):
        output.take(4)


def test_what_is_taken_is_a_copy_of_what_was_put():
    output, given = CommittedRowsOutput(), rows(5)
    before = rows(5)
    output.put(given)
    for field in fields(CommittedRows)[1:5]:
        getattr(given, field.name).zero_()
    taken = output.take(5)
    for field in fields(CommittedRows)[:5]:
        assert torch.equal(getattr(taken, field.name), getattr(before, field.name)), field.name
    assert taken.states.data_ptr() != given.states.data_ptr()

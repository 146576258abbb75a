"""The packed verdict: every value in its column, whatever the memory held before."""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.outcome import reference
from sametoken.kernels.outcome import triton as outcome

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def verdict(batch: int, window: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * 100 + window)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**40, shape, generator=generator).to(DEVICE)

    return *(integers(batch) for _ in range(4)), integers(batch, window)


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (3, 4), (7, 6), (2, 65)])
def test_it_is_the_reference(batch, window, monkeypatch):
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *size, **how: new_empty(*size, **how).fill_(-7)
    )
    columns = verdict(batch, window)
    expected = reference.pack(*columns)
    assert expected.shape == (batch, 4 + window)
    assert torch.equal(outcome.pack(*columns), expected)


def test_no_plan_rows_give_no_rows():
    assert outcome.pack(*verdict(0, 3)).shape == (0, 7)


def test_strided_columns_are_refused():
    columns = list(verdict(4, 2))
    columns[0] = torch.stack((columns[0], columns[0]), dim=1)[:, 0]
    with pytest.raises(AssertionError):
        outcome.pack(*columns)

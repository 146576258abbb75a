from __future__ import annotations

import mmap
import sys

import pytest
import torch

from helpers.budgets import resident_bytes
from sametoken.errors import UnsupportedError
from sametoken.io.pages import drop_pages

PAGE = mmap.PAGESIZE


def test_the_system_gets_the_memory_back():
    num_bytes = 64 * 2**20
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    before = resident_bytes()
    dropped = drop_pages(tensor.data_ptr(), num_bytes)
    assert num_bytes - 2 * PAGE < dropped <= num_bytes
    assert before - resident_bytes() > 0.9 * num_bytes
    assert tensor[PAGE:-PAGE].eq(0).all()


@pytest.mark.parametrize("shift", [0, 1, PAGE - 1])
@pytest.mark.parametrize("num_bytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_bytes_outside_are_left_alone(shift, num_bytes):
    tensor = torch.full((6 * PAGE,), 7, dtype=torch.uint8)
    aligned = -tensor.data_ptr() % PAGE
    first = aligned + shift
    dropped = drop_pages(tensor.data_ptr() + first, num_bytes)
    assert dropped % PAGE == 0
    assert dropped <= num_bytes
    assert tensor[:first].eq(7).all()
    assert tensor[first + num_bytes :].eq(7).all()
    assert tensor.eq(0).sum() == dropped


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin"):
        drop_pages(0, 10 * PAGE)

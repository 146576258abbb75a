"""Verdicts to the host by a kernel: each at its place, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.kernels.transfer import reference
from sametoken.kernels.transfer.triton import deliver, fetch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
UNTOUCHED = -(10**9)


def host_memory(*shape: int) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=torch.int64, pin_memory=ON_GPU)


@pytest.mark.parametrize(("batch", "width", "row_width"), [(1, 5, 5), (3, 5, 9), (7, 9, 9)])
def test_verdicts_go_to_their_places(batch, width, row_width):
    outcome = torch.arange(batch * width, device=DEVICE).view(batch, width)
    places = torch.arange(batch, device=DEVICE).flip(0) * 2
    places[batch // 2] = -1
    rows = host_memory(2 * batch, row_width)
    deliver(outcome, places, rows)
    if ON_GPU:
        torch.cuda.synchronize()
    expected = torch.full_like(rows, UNTOUCHED, pin_memory=False)
    reference.deliver(outcome, places, expected)
    assert (expected != UNTOUCHED).any(dim=1).sum() == batch - 1
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("size", [1, 5, 24])
def test_turns_go_round_the_entries(size):
    entries = host_memory(3, 24)
    entries.copy_(torch.arange(3 * 24).view(3, 24))
    turn = torch.full((1,), 2, dtype=torch.int64, device=DEVICE)
    counted = turn.clone()
    for entry in (2, 0, 1, 2):
        memory = torch.full((size + 3,), UNTOUCHED, dtype=torch.int64, device=DEVICE)
        expected = memory.clone()
        fetch(entries, turn, memory[:size])
        reference.fetch(entries, counted, expected[:size])
        assert torch.equal(memory, expected)
        assert torch.equal(memory[:size].cpu(), entries[entry, :size])
        assert (memory[size:] == UNTOUCHED).all()
    assert turn.item() == counted.item() == 6


def test_launches_compile_for_a_gpu(tmp_path):
    code = """
from sametoken.kernels.transfer import triton

for overlap in ({"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}):
    triton.overlapped = lambda tensor, options=overlap: options
    for batch in (1, 64):
        plan = torch.zeros(5, batch, dtype=torch.int64)
        triton.fetch(torch.zeros(4, 320, dtype=torch.int64), plan[0, :1].clone(), plan)
        outcome = torch.zeros(batch, 9, dtype=torch.int64)
        triton.deliver(outcome, plan[-1], torch.zeros(128, 9, dtype=torch.int64))
"""
    compile_launches(code, tmp_path)

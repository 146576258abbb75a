"""A hybrid's whole forward pass by a GPU's kernels, under the interpreter where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.forward import CPU, Bench
from helpers.hybrids import write_hybrid
from sametoken.models.loader import load_model
from sametoken.ops.backend import Kernels, RowRuns
from sametoken.ops.model.gemm.tuning import load_table
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

PROMPT = [3, 1, 4, 1, 5, 9]


class OneRun(Bench):
    """All rows of a pass are one slot's."""

    def rows_at(self, slots, positions):
        count = len(slots)
        runs = RowRuns(1, count, torch.tensor([0, count]), 0, 0)
        return replace(super().rows_at(slots, positions), runs=runs)


def bench(path, kernels: Kernels) -> OneRun:
    model = load_model(path, kernels=kernels, dtype=torch.float32, device=CPU, max_positions=16)
    return OneRun(model, max_len=16)


def by_kernels(path) -> OneRun:
    return bench(path, TritonKernels(load_table("another device")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, under the interpreter")
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_logits_are_the_reference_s_in_whatever_chunks(tmp_path, kind):
    """Gated attention with partial rotation, Gated DeltaNet, a mixture of experts."""
    path = write_hybrid(tmp_path, kind, layer_types=["linear_attention", "full_attention"] * 2)
    expected = bench(path, ReferenceKernels()).logits(PROMPT, [])
    whole = by_kernels(path).logits(PROMPT, [])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(by_kernels(path).logits(PROMPT, [3, 1]), whole)

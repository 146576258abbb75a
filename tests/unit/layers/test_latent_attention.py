"""A whole model and its module by the Triton backend, under the interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers.forward import CPU, Bench, kept_at
from helpers.heads import empty_kv, rows_of_one_slot
from helpers.latents import write_nextn
from sametoken.models.heads.nextn import NextNCheckpoint
from sametoken.models.loader import load_model
from sametoken.ops.backend import RowRuns
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

TOKEN_IDS = [5, 60, 2, 2, 9]


class RunBench(Bench):
    """Rows with their runs; memory as an engine leaves it, finite."""

    def rows_at(self, slots, positions):
        rows = super().rows_at(slots, positions)
        return replace(rows, runs=RowRuns.even(1, len(slots)))

    def finite(self):
        for memory in self.kv.blocks:
            memory.zero_()
        return self


def test_triton_s_logits_and_drafts_are_near_the_reference_s(tmp_path):
    write_nextn(tmp_path, "deepseek_v3", num_hidden_layers=2)
    logits, drafts = [], []
    for kernels in (ReferenceKernels(), TritonKernels(GemmTable())):
        options = {"kernels": kernels, "dtype": torch.float32, "device": CPU, "max_positions": 64}
        target = load_model(tmp_path, **options)
        logits.append(RunBench(target).finite().logits(TOKEN_IDS, [2]))
        head = NextNCheckpoint(tmp_path).load(target, **options)
        kv = empty_kv(head)
        for memory in kv.blocks:
            memory.zero_()
        rows = replace(rows_of_one_slot(0, 3), runs=RowRuns.even(1, 3))
        hidden = torch.linspace(-1, 1, 96).view(3, 32)
        kept = kept_at(rows, [2])
        states = head.forward(torch.tensor(TOKEN_IDS[:3]), hidden, rows, kv, kept)
        drafts.append(head.compute_logits(states.last))
    for expected, found in (logits, drafts):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

"""Embedding lookup in Triton: exact rows, alone and normed beside hidden states."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import DEVICE, close, noise
from sametoken.layers.norm import RMSNorm
from sametoken.ops.model.embedding_triton import embed_beside, embedding
from sametoken.ops.model.norm_triton import rms_norm
from sametoken.ops.reference import PlainWeight, ReferenceKernels

KERNELS = ReferenceKernels()
VOCAB = 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 99, 1030])
def test_embedding(width, dtype):
    matrix = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(0))
    matrix = matrix.to(DEVICE, dtype)
    token_ids = torch.tensor([10, 0, 3, 3], device=DEVICE)
    expected = PlainWeight(matrix).rows(token_ids)
    assert torch.equal(embedding(token_ids, matrix), expected)
    # Rows of states are taken alike.
    assert torch.equal(expected, KERNELS.take_rows(matrix, token_ids))
    assert embedding(token_ids[:0], matrix).shape == (0, width)
    assert KERNELS.take_rows(matrix, None) is matrix


def test_hidden_states_of_nan_change_no_other_row():
    beside = Beside(5, 99, torch.float32)
    expected = beside.run()
    beside.hidden[[0, 3]] = torch.nan
    got = beside.run()
    assert torch.equal(got[[1, 2, 4]], expected[[1, 2, 4]])
    assert torch.equal(got[:, :99], expected[:, :99])


class Beside:
    """Operands of ``embed_beside``: both norms differ in weight and eps."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, norm_dtype: torch.dtype | None = None
    ) -> None:
        self.token_ids = torch.arange(rows, device=DEVICE) * 7 % VOCAB
        self.matrix = noise(VOCAB, width, dtype=dtype, seed=0)
        self.hidden = noise(rows, width, dtype=dtype, seed=1)
        self.norms = [
            RMSNorm(KERNELS, noise(width, dtype=norm_dtype or dtype, seed=seed), eps)
            for seed, eps in ((2, 1e-5), (3, 0.1))
        ]

    def run(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        ids, hidden = self.token_ids[rows].clone(), self.hidden[rows].clone()
        return embed_beside(ids, self.matrix, self.norms[0], hidden, self.norms[1])

    def run_reference(self) -> torch.Tensor:
        weight = PlainWeight(self.matrix)
        return KERNELS.embed_beside(
            self.token_ids, weight, self.norms[0], self.hidden, self.norms[1]
        )

    def run_in_parts(self) -> torch.Tensor:
        left = rms_norm(
            embedding(self.token_ids, self.matrix), self.norms[0].weight, self.norms[0].eps
        )
        right = rms_norm(self.hidden.clone(), self.norms[1].weight, self.norms[1].eps)
        return torch.cat((left, right), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 99), (12, 16), (5, 576)])
@pytest.mark.usefixtures("poisoned_memory")
def test_embeddings_beside_hidden_states(rows, width, dtype):
    beside = Beside(rows, width, dtype)
    before = beside.hidden.clone()
    found = beside.run()
    assert found.shape == (rows, 2 * width)
    assert found.dtype == dtype
    close(found, beside.run_reference())
    # To the bit what three launches and a copy of both halves give.
    assert torch.equal(found, beside.run_in_parts())
    assert torch.equal(beside.hidden, before)


def test_norms_beside_may_have_fp32_weights():
    beside = Beside(4, 99, torch.float16, norm_dtype=torch.float32)
    close(beside.run(), beside.run_reference())
    assert torch.equal(beside.run(), beside.run_in_parts())


def test_rows_beside_know_nothing_of_each_other():
    beside = Beside(9, 99, torch.float32)
    whole = beside.run()
    alone = [beside.run(slice(row, row + 1)) for row in range(9)]
    assert torch.equal(torch.cat(alone), whole)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(beside.run(order), whole[order])


def test_no_rows_beside():
    assert Beside(0, 64, torch.float32).run().shape == (0, 128)


def test_it_compiles_for_a_gpu_alone_and_overlapped(tmp_path):
    code = """
from types import SimpleNamespace
from sametoken.ops.model import embedding_triton as kernels

ids = torch.zeros(3, dtype=torch.int64)
SIZES = ((4096, torch.bfloat16), (99, torch.bfloat16), (64, torch.float32))
for sizes, options in ((SIZES[:1], {"PDL": False}), (SIZES, {"PDL": True, "launch_pdl": True})):
    kernels.pdl_options = lambda tensor: options
    for width, dtype in sizes:
        x = torch.zeros(3, width, dtype=dtype)
        for weight in (x[0], x[0].float()):
            norm = SimpleNamespace(weight=weight, eps=1e-6)
            kernels.embed_beside(ids, x, norm, x, norm)
"""
    compile_launches(code, tmp_path)

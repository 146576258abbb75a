"""Embedding lookup in Triton copies rows exactly."""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.embedding.triton import embedding
from sametoken.kernels.gemm import reference
from sametoken.kernels.gemm.reference import PlainWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 99, 1030])
def test_embedding(width, dtype):
    matrix = torch.randn(11, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    token_ids = torch.tensor([10, 0, 3, 3], device=DEVICE)
    expected = reference.embedding(token_ids, PlainWeight(matrix))
    assert torch.equal(embedding(token_ids, matrix), expected)

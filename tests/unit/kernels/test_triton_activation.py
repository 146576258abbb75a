"""The gated activation in Triton against its reference."""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.activation import reference
from sametoken.kernels.activation.triton import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 97), (2, 1500)])
def test_silu_mul(rows, width, dtype):
    generator = torch.Generator().manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width, generator=generator)).to(DEVICE, dtype)
    actual = silu_mul(gate_up)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, reference.silu_mul(gate_up), rtol=tolerance, atol=tolerance)
    assert torch.equal(silu_mul(gate_up[-1:].clone()), actual[-1:])

"""The gated activation in Triton against its reference."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.model import activation as reference
from sametoken.ops.model.activation_triton import (
    clamped_swiglu,
    gelu_mul,
    sigmoid_mul,
    silu_mul,
    soft_cap,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 97), (2, 1500)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(rows, width, dtype, name):
    run, defined = {"silu_mul": silu_mul, "gelu_mul": gelu_mul}[name], getattr(reference, name)
    generator = torch.Generator().manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width, generator=generator)).to(DEVICE, dtype)
    actual = run(gate_up)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, defined(gate_up), rtol=tolerance, atol=tolerance)
    assert torch.equal(run(gate_up[-1:].clone()), actual[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 97), (2, 1500)])
@pytest.mark.parametrize("limit", [0.7, 7.0])
def test_clamped_swiglu(rows, width, dtype, limit):
    generator = torch.Generator().manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width, generator=generator)).to(DEVICE, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    glu = gate.clamp(max=limit) * torch.sigmoid(1.702 * gate.clamp(max=limit))
    wanted = (glu * (up.clamp(-limit, limit) + 1)).to(dtype)
    actual = clamped_swiglu(gate_up, 1.702, limit)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for found in (actual, reference.clamped_swiglu(gate_up.cpu(), 1.702, limit).to(DEVICE)):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(clamped_swiglu(gate_up[-1:].clone(), 1.702, limit), actual[-1:])


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 97), (2, 1500)])
def test_soft_cap(rows, width):
    logits = 90 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    logits[0, :3] = torch.tensor([-1e30, 1e30, 0.0])
    actual = soft_cap(logits.to(DEVICE), 30.0)
    torch.testing.assert_close(actual.cpu(), reference.soft_cap(logits, 30.0), rtol=0, atol=2e-5)
    assert torch.equal(soft_cap(logits[-1:].to(DEVICE), 30.0), actual[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 97), (2, 1500)])
def test_sigmoid_mul(rows, width, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gate = (4 * torch.randn(2, rows, width + 3, generator=generator)).to(dtype)
    x, gate = x[:, :width].contiguous(), gate[:, 3:]
    actual = sigmoid_mul(x.to(DEVICE), gate.to(DEVICE))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    expected = reference.sigmoid_mul(x, gate).to(DEVICE)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(sigmoid_mul(x[-1:].to(DEVICE), gate[-1:].to(DEVICE)), actual[-1:])
    one = gate[:, :1].to(DEVICE).expand_as(actual)
    assert torch.equal(sigmoid_mul(x.to(DEVICE), one), sigmoid_mul(x.to(DEVICE), one.contiguous()))


def test_sigmoid_mul_of_no_rows_takes_any_gate():
    """One logit a row, widened: without rows PyTorch calls that contiguous as it is."""
    gate = torch.zeros(0, 1, device=DEVICE).expand(0, 16).contiguous()
    assert sigmoid_mul(torch.zeros(0, 16, device=DEVICE), gate).shape == (0, 16)

"""The loss and its gradients are those that autograd makes of all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sametoken.train import objectives
from sametoken.train.objectives import verify_rows


def _case(num_rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + width)
    last = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(width, 7, generator=generator, dtype=torch.float64)
    probabilities = torch.randn(num_rows, width, generator=generator).softmax(-1)
    counted = torch.rand(num_rows, generator=generator) < 0.7
    return last.requires_grad_(), weight.requires_grad_(), probabilities, counted


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (5, 13), (33, 130)])
@pytest.mark.parametrize("logits_at_once", [1, 400, 2**20])
def test_loss_gradients_and_choices(
    num_rows: int, width: int, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "_CPU_LOGITS", logits_at_once)
    last, weight, probabilities, counted = _case(num_rows, width)
    loss, chosen = verify_rows(last, weight, probabilities, counted)
    logits = last @ weight.T
    losses = -(probabilities * logits.log_softmax(-1)).sum(-1)
    wanted = losses[counted].sum() / max(int(counted.sum()), 1)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, logits.argmax(-1))
    found = torch.autograd.grad(3.0 * loss, (last, weight))
    expected = torch.autograd.grad(3.0 * wanted, (last, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_counted_have_no_gradient() -> None:
    last, weight, probabilities, counted = _case(6, 9)
    counted[:] = torch.tensor([True, False, True, False, False, True])
    loss, _ = verify_rows(last, weight, probabilities, counted)
    (slopes,) = torch.autograd.grad(loss, last)
    assert torch.equal(slopes.abs().amax(-1) > 0, counted)


def test_no_counted_row_is_a_loss_of_zero() -> None:
    last, weight, probabilities, counted = _case(4, 5)
    loss, _ = verify_rows(last, weight, probabilities, torch.zeros_like(counted))
    slopes, _ = torch.autograd.grad(loss, (last, weight))
    assert loss.item() == 0.0
    assert torch.equal(slopes, torch.zeros_like(slopes))


def test_a_frozen_weight_gets_no_gradient() -> None:
    last, weight, probabilities, counted = _case(4, 5)
    loss, _ = verify_rows(last, weight.detach(), probabilities, counted)
    loss.backward()
    assert last.grad is not None
    assert weight.grad is None

"""Gradients of a mixture of experts in Triton, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import noise
from sametoken.exact.functions import gradients
from sametoken.ops.gradients import experts_triton
from sametoken.ops.gradients.experts_triton import expert_gradients
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.reference import PlainWeight
from sametoken.ops.weight import GeluExperts

ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3}
HIDDEN, INNER = 33, 20


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(experts_triton, "_SHARES", 2)


class Plain(PlainWeight):
    """Of plain autograd."""

    def matmul(self, x, bias=None, out_dtype=None):
        return x @ self.matrix.mT


def scene(rows: int, count: int, top_k: int, activation: str, dtype: torch.dtype):
    """x, choices, weights, both stacks, and the gradient of the result."""
    width = INNER if activation == "relu_squared" else 2 * INNER
    scores = noise(rows, count, dtype=torch.float32, seed=5)
    chosen = scores.topk(top_k).indices
    inputs = [
        noise(rows, HIDDEN, dtype=dtype, seed=0),
        scores.sigmoid().gather(1, chosen),
        noise(count, width, HIDDEN, dtype=dtype, seed=1) / HIDDEN**0.5,
        noise(count, HIDDEN, INNER, dtype=dtype, seed=2) / INNER**0.5,
    ]
    return inputs, chosen, noise(rows, HIDDEN, dtype=dtype, seed=3)


def found(inputs, chosen, of, activation):
    x, weights, gate_up, down = inputs
    return expert_gradients(x, chosen, weights, gate_up, down, activation, of)


def wanted(inputs, chosen, of, activation):
    form = GeluExperts() if activation == "gelu_mul" else None

    def formula(x, weights, gate_up, down):
        packed = [[Plain(one) for one in stack] for stack in (gate_up, down)]
        return SeparateExperts(*packed, form=form)(x, chosen, weights)

    return gradients(formula, [one.float() for one in inputs], [True] * 4, [of])


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul", "relu_squared"])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "dtype"),
    [(1, 4, 2, torch.float32), (40, 2, 2, torch.float32), (21, 6, 1, torch.float16)],
)
def test_gradients_are_those_of_autograd(rows, count, top_k, activation, dtype):
    """Experts of more rows than the tiles of all programs, and of none."""
    inputs, chosen, of = scene(rows, count, top_k, activation, dtype)
    for one in inputs[2:]:
        one.requires_grad_()
    ours = found(inputs, chosen, of, activation)
    for mine, plain, given in zip(
        ours, wanted(inputs, chosen, of, activation), inputs, strict=True
    ):
        assert mine.dtype == given.dtype
        assert (mine - plain).norm() < ERRORS[dtype] * plain.norm()


def test_an_expert_that_nobody_chose_gets_zeros_and_frozen_ones_nothing():
    inputs, chosen, of = scene(5, 4, 2, "silu_mul", torch.float32)
    inputs[2].requires_grad_()
    _, _, by_gate_up, by_down = found(inputs, chosen % 3, of, "silu_mul")
    assert by_down is None
    assert not by_gate_up[3].any()
    assert by_gate_up[:3].any(dim=(1, 2)).all()


def test_the_kernels_compile_for_a_gpu(tmp_path):
    compile_launches(
        """
from sametoken.ops.gradients import experts_triton
from sametoken.ops.gradients.experts_triton import expert_gradients
of = x = torch.zeros(70, 64, dtype=torch.bfloat16)
chosen, weights = torch.zeros(70, 4, dtype=torch.int64), torch.zeros(70, 4)
gate_up = torch.zeros(8, 64, 64, dtype=torch.bfloat16, requires_grad=True)
down = torch.zeros(8, 64, 32, dtype=torch.bfloat16, requires_grad=True)
expert_gradients(x, chosen, weights, gate_up, down, "silu_mul", of)
""",
        tmp_path,
    )

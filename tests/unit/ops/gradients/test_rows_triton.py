"""Gradients of norms, rotary embedding and activations in Triton, in poisoned memory."""

from __future__ import annotations

import pytest
import torch

from helpers.poisoned import noise
from sametoken.exact.functions import gradients
from sametoken.ops.backend import AttentionShape, QKNorm, RotaryTable
from sametoken.ops.gradients import rows_triton
from sametoken.ops.model.activation import silu_mul
from sametoken.ops.model.norm_rope import normed_and_rotated, rms_norm

ERRORS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
EPS = 1e-5


def close(found, wanted) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < ERRORS[ours.dtype]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that a program has several rows."""
    monkeypatch.setattr(rows_triton, "PROGRAMS", 3)


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (8, 99)])
def test_norm(rows, width, dtype):
    x, of = noise(rows, width, dtype=dtype, seed=0), noise(rows, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    wanted = gradients(
        lambda x, weight: rms_norm(x, weight, EPS), wide(x, weight), (True, True), [of]
    )
    close(rows_triton.norm_gradients(x, weight, EPS, of), wanted)
    residual = noise(rows, width, dtype=dtype, seed=3)
    wanted[0] += residual
    close(rows_triton.norm_gradients(x, weight, EPS, of, residual), wanted)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (24, 6), (12, 0)])
def test_rotary(dim, half, normed, dtype):
    """Whole heads, parts of them and none; three and two heads."""
    shape, rows = AttentionShape(3, 2, dim) if dim == 24 else AttentionShape(4, 2, dim), 7
    qkv = noise(rows, shape.q_size + 2 * shape.kv_size, dtype=dtype, seed=0)
    of = tuple(
        noise(rows, heads, dim, dtype=dtype, seed=1 + heads)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    angles = noise(9, half, dtype=torch.float32, seed=6)
    rotary = RotaryTable(angles.cos(), angles.sin())
    positions = torch.arange(rows, device=qkv.device) + 2
    weights = [noise(dim, dtype=dtype, seed=seed) for seed in (7, 8)] if normed else []

    def norm(weights) -> QKNorm | None:
        return QKNorm(*weights, EPS) if normed else None

    wanted = gradients(
        lambda qkv, *weights: normed_and_rotated(qkv, shape, rotary, positions, norm(weights)),
        wide(qkv, *weights),
        (True,) * (1 + len(weights)),
        of,
    )
    close(
        rows_triton.rotary_gradients(qkv, shape, rotary, positions, norm(weights), of),
        wanted,
    )


@pytest.mark.parametrize("dtype", ERRORS)
def test_silu_mul(dtype):
    gate_up, of = noise(3, 2 * 1100, dtype=dtype, seed=0), noise(3, 1100, dtype=dtype, seed=1)
    wanted = gradients(silu_mul, wide(gate_up), (True,), [of])
    close([rows_triton.silu_mul_gradient(gate_up, of)], wanted)

"""Gradients of attention in Triton against those of the formula, in poisoned memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.poisoned import DEVICE, noise, poisoned
from sametoken.exact.functions import attended, gradients
from sametoken.ops.backend import AttentionShape
from sametoken.ops.gradients.attention_triton import attention_gradients

LENGTHS = (1, 33, 40)
#: Of the norm of a gradient: in fp16, of weights and their gradients that are rounded.
ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3}
SHAPES = {
    "heads": AttentionShape(2, 2, 16),
    "groups": AttentionShape(6, 2, 24),
    "window": AttentionShape(2, 1, 32, sliding_window=7),
    "long-window": AttentionShape(2, 1, 16, sliding_window=40, score_factor=0.5),
}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_formula(name, dtype):
    shape, rows = SHAPES[name], sum(LENGTHS)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    qkv = tuple(
        noise(rows, count, shape.head_dim, dtype=dtype, seed=seed)
        for seed, count in enumerate(heads)
    )
    of = noise(rows, shape.q_size, dtype=dtype, seed=3)
    wanted, outputs = [], []
    parts = [torch.split(tensor, LENGTHS) for tensor in (*qkv, of)]
    for *one, piece in zip(*parts, strict=True):
        outputs.append(attended(*(tensor.float() for tensor in one), shape))
        wide = [tensor.float() for tensor in one]
        wanted.append(gradients(lambda *x: attended(*x, shape), wide, (True,) * 3, [piece]))
    out = poisoned(torch.cat(outputs).to(dtype))
    starts = torch.tensor([0, 1, 34, 74], device=DEVICE)
    found = attention_gradients(qkv, out, of, shape, starts, max(LENGTHS))
    for ours, theirs, tensor in zip(found, zip(*wanted, strict=True), qkv, strict=True):
        expected = torch.cat(theirs)
        assert ours.dtype == dtype
        assert ours.shape == tensor.shape
        assert (ours.float() - expected).norm() < ERRORS[dtype] * expected.norm()


def test_a_sequence_has_the_same_bits_in_any_packing():
    shape, dtype = SHAPES["groups"], torch.float16
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    q, k, v, out = (
        noise(50, count, shape.head_dim, dtype=dtype, seed=seed) for seed, count in enumerate(heads)
    )
    out, of = out.flatten(1), noise(50, shape.q_size, dtype=dtype, seed=5)

    def found(rows: slice, *starts: int) -> tuple[torch.Tensor, ...]:
        qkv = (q[rows], k[rows], v[rows])
        longest = max(end - begin for begin, end in pairwise(starts))
        places = torch.tensor(starts, device=DEVICE)
        return attention_gradients(qkv, out[rows], of[rows], shape, places, longest)

    packed, alone = found(slice(None), 0, 17, 50), found(slice(17, None), 0, 33)
    assert all(torch.equal(a[17:], b) for a, b in zip(packed, alone, strict=True))

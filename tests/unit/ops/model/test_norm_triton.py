"""Norms in Triton against their references, in poisoned memory."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.poisoned import DEVICE, close, noise, poisoned
from sametoken.ops.model import norm_rope as reference
from sametoken.ops.model import norm_triton as norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 99), (5, 576)])
def test_rms_norm(rows, width, dtype):
    x, weight = noise(rows, width, dtype=dtype), noise(width, dtype=dtype, seed=1)
    before = x.clone()
    normed = norm.rms_norm(x, weight, 1e-5)
    close(normed, reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)
    for wider in (64, 41):
        part = torch.cat((x, noise(rows, wider, dtype=dtype)), dim=1)[:, :width]
        assert torch.equal(norm.rms_norm(part, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rms_norm_rounds_the_residual_once_and_works_in_place(dtype):
    x, residual = noise(4, 99, dtype=dtype), noise(4, 99, dtype=dtype, seed=1)
    weight = noise(99, dtype=dtype, seed=2)
    expected, total = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    normed, summed = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, total)
    assert summed.data_ptr() == residual.data_ptr()
    close(normed, expected)
    # What is normed is the rounded sum: a product that added the residual gives these bits too.
    assert torch.equal(normed, norm.rms_norm(poisoned(total), weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 64), (3, 5, 99), (2, 32, 8)])
def test_gated_rms_norm_and_fp32_weights(rows, heads, width, dtype):
    """The gate is a part of a wider projection."""
    x = noise(rows, heads * width, dtype=dtype)
    gate = noise(rows, heads * width + 7, dtype=dtype, seed=1)[:, 3:-4]
    weight = noise(width, seed=2)
    expected = reference.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-5).to(DEVICE)
    actual = norm.gated_rms_norm(x, gate, weight, 1e-5)
    close(actual, expected)
    by_head = (x.view(-1, width), gate.reshape(-1, width))
    heads_alone = reference.gated_rms_norm(*(t.cpu() for t in by_head), weight.cpu(), 1e-5)
    close(heads_alone.view(x.shape).to(DEVICE), expected)
    last = norm.gated_rms_norm(x[-1:].clone(), gate[-1:].clone(), weight, 1e-5)
    assert torch.equal(last, actual[-1:])


def test_norm_rows_know_nothing_of_each_other():
    x, residual, weight = noise(9, 99), noise(9, 99, seed=1), noise(99, seed=2)
    alone = [
        norm.add_rms_norm(x[i : i + 1].clone(), residual[i : i + 1].clone(), weight, 1e-6)[0]
        for i in range(9)
    ]
    together = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)[0]
    assert torch.equal(torch.cat(alone), together)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    moved = norm.add_rms_norm(x[order], residual[order], weight, 1e-6)[0]
    assert torch.equal(moved, together[order])


NORMS = """
from sametoken.ops.model import norm_triton as norm
wide, (weight, _) = torch.zeros(2, 2112, dtype=torch.bfloat16), torch.zeros(2, {width}).bfloat16()
norm.rms_norm({rows}, weight, 1e-6)
"""
#: The layout of what is added up: which thread holds which elements.
ADDED = re.compile(r'"tt.reduce"(?:(?!"tt.reduce").)*?arith.addf.*?: \(tensor<\w+, (#\w+)>\)', re.S)


@pytest.mark.parametrize("width", [512, 1536])
def test_rows_that_lie_apart_are_added_in_the_order_of_others(tmp_path, width):
    layouts = []
    for rows in ("wide[:, :{}].contiguous()", "wide[:, :{}]"):
        cache = tmp_path / str(len(layouts))
        cache.mkdir()
        compile_launches(NORMS.format(width=width, rows=rows.format(width)), cache)
        (file,) = cache.rglob("_rms_norm_kernel.ttgir")
        code = file.read_text()
        (name,) = ADDED.findall(code)
        layouts.append(re.search(rf"^{name} = (.*)$", code, re.M)[1])
    assert layouts[0] == layouts[1]


def test_no_rows():
    assert norm.rms_norm(noise(0, 64), noise(64), 1e-5).shape == (0, 64)

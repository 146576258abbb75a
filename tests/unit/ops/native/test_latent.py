"""Latent attention in C against the reference, and the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.latent_scene import LatentScene
from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.latent_attention import reference
from sametoken.ops.model.latent_attention.reference import PlainHeadWeights
from sametoken.ops.model.latent_attention.shape import LatentRotary, LatentShape, LayerLatent
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SCALE = 0.3
BOTH = [ReferenceKernels(), NativeKernels()]
WHERE = [(0, 599), (0, 600), (0, 255), (0, 256), (1, 0), (1, 39), (0, 511)]


@pytest.mark.parametrize("scale", [None, 0.3], ids=["wide", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 5, 64])
@pytest.mark.parametrize("kernels", BOTH, ids=lambda one: one.name)
@pytest.mark.usefixtures("one_thread")
def test_attention_is_right_and_a_row_has_its_bits_in_any_company(kernels, heads, dtype, scale):
    scene = LatentScene([601, 40], heads=heads, dtype=dtype, scale=scale)
    q, rows = scene.rows(WHERE)
    together = kernels.latent_attention(q, SCALE, rows, scene.memory)
    tolerance = 3e-6 if dtype is torch.float32 else 2e-2
    expected = scene.expected(q, rows, SCALE)
    torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=tolerance)
    torch.set_num_threads(2)
    for row in range(len(WHERE)):
        one = slice(row, row + 1)
        alone = replace(rows, positions=rows.positions[one], slots=rows.slots[one])
        found = kernels.latent_attention(q[one].contiguous(), SCALE, alone, scene.memory)
        assert torch.equal(found[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "features", "depth"), [(1, 33, 16), (5, 64, 24), (3, 40, 136)])
@pytest.mark.parametrize("kernels", BOTH, ids=lambda one: one.name)
def test_products_are_per_head_and_per_row(kernels, heads, features, depth, dtype):
    torch.manual_seed(0)
    x = torch.full((29, heads, depth + 2), torch.nan, dtype=dtype)[..., :depth]
    x.copy_(torch.randn(x.shape))
    matrices = torch.randn(heads, features, depth).to(dtype)
    weight = kernels.pack_heads(matrices.clone())
    out = torch.full((29, heads, features + 3), 7.0, dtype=dtype)
    weight.matmul(x, out[..., :features])
    expected = torch.einsum("thk,hnk->thn", x.double(), matrices.double())
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(
        out[..., :features].double(), expected, rtol=tolerance, atol=tolerance
    )
    assert (out[..., features:] == 7).all()
    alone = torch.empty(1, heads, features, dtype=dtype)
    weight.matmul(x[17:18], alone)
    assert torch.equal(alone[0], out[17, :, :features])
    last = torch.empty(29, 1, features, dtype=dtype)
    weight.heads(heads - 1, heads).matmul(x[:, -1:], last)
    assert torch.equal(last[:, 0], out[:, -1, :features])
    blocks = torch.empty(4, heads, 7, features, dtype=dtype).transpose(1, 2)
    weight.matmul(x[:28].unflatten(0, (4, 7)), blocks)
    assert torch.equal(blocks.flatten(0, 1), out[:28, :, :features])
    turned = torch.empty_like(out[..., :features])
    kernels.pack_heads(matrices.mT).transposed().matmul(x, turned)
    assert torch.equal(turned, out[..., :features])
    assert weight.nbytes >= matrices.nbytes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_write_agree_with_the_reference(dtype, interleaved):
    torch.manual_seed(0)
    q = torch.randn(5, 3, 20).to(dtype)[..., 12:]
    latent = torch.randn(5, 35).to(dtype)[:, 3:]
    angles = torch.rand(64, 4)
    rotary = LatentRotary(torch.randn(24).to(dtype), 1e-6, angles.cos(), angles.sin(), interleaved)
    positions = torch.tensor([3, 4, 60, 0, 9])
    rows = AttentionRows(positions, positions, torch.tensor([19, 20, 44, 0, 25]), positions[None])
    written = []
    for kernels in BOTH:
        memory = LayerLatent(torch.full((3, 16, 32), 5.0, dtype=dtype), 24)
        out = torch.full((5, 3, 32), 5.0, dtype=dtype)
        kernels.latent_rope_and_cache(q, latent, rotary, rows, memory, out[..., 24:])
        written.append((memory.vectors, out))
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    for expected, found in zip(*written, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_impossible_arguments_are_refused():
    kernels = NativeKernels()
    for rank, rope_dim in ((20, 8), (24, 4), (1024, 64)):
        with pytest.raises(UnsupportedError, match="multiples of 8"):
            kernels.require_latent(LatentShape(2, rank, rope_dim, 1.0))
    weight = kernels.pack_heads(torch.zeros(2, 8, 8))
    with pytest.raises(InvariantError):
        weight.matmul(torch.zeros(3, 1, 8), torch.zeros(3, 2, 8))
    with pytest.raises(InvariantError):
        weight.matmul(torch.zeros(3, 2, 8).bfloat16(), torch.zeros(3, 2, 8))
    q, rows = LatentScene([9]).rows([(0, 3)])
    with pytest.raises(InvariantError):
        kernels.latent_attention(q.bfloat16(), 1.0, rows, LatentScene([9]).memory)
    assert isinstance(ReferenceKernels().pack_heads(torch.zeros(1, 8, 8)), PlainHeadWeights)
    assert reference.attention(q, 1.0, rows, LatentScene([9]).memory).shape == (1, 3, 24)

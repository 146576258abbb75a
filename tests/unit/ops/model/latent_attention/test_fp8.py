"""Latent vectors in float8: the bytes that are stored, and the bits of rows that read them."""

from __future__ import annotations

import pytest
import torch

from helpers.float8 import nearest, pool
from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.latent_attention import rope_triton
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

RANK, ROPE, HEADS, BLOCK_SIZE, LENGTH = 40, 8, 3, 16, 40
KERNELS = (NativeKernels(), ReferenceKernels())
BLOCKS = torch.tensor([[3, 1, 4]])


def memory(scale: float | None, byte: int = 0x7F) -> LayerLatent:
    """Memory of one byte, NaN by default."""
    vectors = torch.full((5, BLOCK_SIZE, RANK + ROPE), byte, dtype=torch.uint8).view(FLOAT8)
    return LayerLatent(vectors, RANK, None if scale is None else torch.tensor([scale]))


def rows_at(positions) -> AttentionRows:
    positions = torch.as_tensor(positions)
    kv_slots = BLOCKS[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionRows(positions, torch.zeros_like(positions), kv_slots, BLOCKS)


# Of keys whose infinite elements are rotated, too.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, None), (torch.float32, 0.3)])
def test_every_implementation_stores_the_nearest_byte(dtype, scale):
    """Latents of ones and minus ones are normed to the norm's weight, and nothing is turned."""
    generator = torch.Generator().manual_seed(0)
    numbers, rows = pool(generator).to(dtype), rows_at(range(11, 20))
    latent = numbers[torch.randint(len(numbers), (9, RANK + ROPE), generator=generator)]
    latent[:, :RANK] = torch.randint(2, (9, RANK), generator=generator) * 2 - 1
    of_latents = numbers[~numbers.isnan()]
    for weight in of_latents.split(RANK)[:-1]:
        rotary = LatentRotary(weight, 0.0, torch.ones(20, 4), torch.zeros(20, 4), False)
        turned = latent[:, RANK:].float() + 0 * latent[:, RANK:].float().roll(4, 1)
        wanted = torch.cat((latent[:, :RANK].float() * weight.float(), turned), 1)
        writers = [*(one.latent_rope_and_cache for one in KERNELS), rope_triton.rope_and_cache]
        for write in writers:
            own, out = memory(scale, byte=0), torch.empty(9, HEADS, ROPE, dtype=dtype)
            write(out.clone(), latent, rotary, rows, own, out)
            stored = own.vectors.view(torch.uint8).flatten(0, 1)
            assert torch.equal(stored[rows.kv_slots], nearest(wanted / (scale or 1)))
            assert stored.any(-1).sum() == 9, "only the rows' vectors are written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_a_row_reads_what_is_stored_in_any_step(kernels, dtype):
    """Of prompts, windows and single rows; whoever read its own step unrounded would differ."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(LENGTH, RANK + ROPE, generator=generator).to(dtype)
    queries = torch.randn(LENGTH, HEADS, RANK + ROPE, generator=generator).to(dtype)
    angles = torch.rand(LENGTH, ROPE // 2, generator=generator)
    weight = torch.rand(RANK, generator=generator).to(dtype)
    rotary = LatentRotary(weight, 1e-6, angles.cos(), angles.sin(), True)

    def in_steps(sizes, scale):
        own, out, first = memory(scale), [], 0
        for size in sizes:
            rows, q = rows_at(range(first, first + size)), queries[first : first + size].clone()
            turned = q[..., RANK:]
            part = latent[first : first + size]
            kernels.latent_rope_and_cache(turned.clone(), part, rotary, rows, own, turned)
            out.append(kernels.latent_attention(q, 0.3, rows, own))
            first += size
        return torch.cat(out)

    for scale in (None, 0.3):
        alone = in_steps([1] * LENGTH, scale)
        assert not alone.isnan().any()
        for sizes in ([LENGTH], [7, 9, 24], [33, 1, 5, 1]):
            assert torch.equal(in_steps(sizes, scale), alone)

"""Keys, values and latents in float8 on a chip: the reference's bytes, and what reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RotaryTable, RowRuns
from sametoken.ops.hopper import is_hopper
from sametoken.ops.model import norm_rope
from sametoken.ops.model.attention import reference
from sametoken.ops.model.attention.kv import FLOAT8, KVScales
from sametoken.ops.model.attention.triton import attention, choose
from sametoken.ops.model.latent_attention import reference as latent_reference
from sametoken.ops.model.latent_attention import triton as latent_triton
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
from sametoken.ops.model.latent_attention.tuning import LatentConfig
from sametoken.ops.triton import TritonKernels

SHAPE = AttentionShape(32, 8, 128)
BLOCK_SIZE, NUM_BLOCKS, LENGTH = 64, 12, 700
CUDA = torch.device("cuda")
ON_HOPPER = torch.cuda.is_available() and is_hopper(CUDA)
RANK, ROPE, HEADS, FACTOR = 512, 64, 16, 0.07
FORMS = [
    one
    for form in ("sequential", "split_kv")
    for one in (
        LatentConfig(form, 64, 64, num_warps=8, num_stages=2),
        LatentConfig(form, 16, 64, num_warps=4, num_stages=2, kv_left=True),
    )
]


def memory() -> LayerKV:
    """Keys of NaN and the largest values."""
    size = (NUM_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    keys, values = (torch.full(size, one, dtype=torch.uint8, device=CUDA) for one in (0x7F, 0x7E))
    k = torch.rand(SHAPE.num_kv_heads, device=CUDA) + 0.1
    return LayerKV(keys.view(FLOAT8), values.view(FLOAT8), KVScales(k, k / 3))


def rows_at(first: int, count: int) -> AttentionRows:
    positions = torch.arange(first, first + count, device=CUDA)
    table = torch.arange(NUM_BLOCKS, device=CUDA).flip(0)[None].contiguous()
    kv_slots = table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionRows(positions, positions * 0, kv_slots, table, RowRuns.even(1, count))


def fused() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    width = SHAPE.q_size + 2 * SHAPE.kv_size
    return torch.randn(LENGTH, width, device=CUDA, generator=generator).bfloat16()


def test_bytes_are_the_reference_s():
    """Nothing is rotated, so that the fp32 values are the same."""
    odd = [0.0, 2**-9, 2**-10, 3 * 2**-10, 448.0, 464.0, 465.0, 1e30, torch.inf]
    qkv = fused() * 60
    qkv[:, -len(odd) :] = torch.tensor(odd, device=CUDA)
    table = RotaryTable(*torch.zeros(2, LENGTH, 0, device=CUDA))
    kv, rows = memory(), rows_at(0, LENGTH)
    twin = LayerKV(kv.keys.clone(), kv.values.clone(), kv.scales)
    TritonKernels().rope_and_cache(qkv, SHAPE, table, rows, kv, None)
    norm_rope.rope_and_cache(qkv, SHAPE, table, rows, twin, None)
    for mine, theirs in ((kv.keys, twin.keys), (kv.values, twin.values)):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_every_step_and_form(window):
    shape, qkv, kernels = replace(SHAPE, sliding_window=window), fused(), TritonKernels()
    table = RotaryTable(*torch.rand(2, LENGTH, 64, device=CUDA))

    def in_steps(*sizes: int) -> torch.Tensor:
        torch.manual_seed(1)
        kv, out, first = memory(), [], 0
        for size in sizes:
            rows = rows_at(first, size)
            q = kernels.rope_and_cache(qkv[first : first + size], shape, table, rows, kv, None)
            out.append(kernels.attention(q, shape, rows, kv))
            first += size
        chosen = choose(1, size, shape, LENGTH, q.dtype)
        others = [
            attention(q, shape, rows, kv, config=replace(chosen, form=form))
            for form in ("sequential", "split_kv")
        ]
        assert torch.equal(*others)
        assert ON_HOPPER or torch.equal(out[-1], others[0])
        wanted = reference.attention(q, shape, rows, kv)
        for found in (others[0], out[-1]):
            assert (found - wanted).float().norm() / wanted.float().norm() < 0.01
        return torch.cat(out)

    whole = in_steps(LENGTH)
    assert not whole.isnan().any()
    assert torch.equal(in_steps(300, 100, 200, 100), whole)
    assert torch.equal(in_steps(600, *[5, 1] * 16, 4), whole)


@pytest.mark.skipif(not ON_HOPPER, reason="Triton's kernels read bytes on other chips")
@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(16, 4, 256), AttentionShape(64, 8, 64)])
def test_float8_has_the_bits_of_its_numbers_in_16_bits(shape):
    """Runs of one row, windows and prompts, in every form that they choose."""
    generator = torch.Generator("cuda").manual_seed(3)
    size = (48, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    stored = [torch.randn(size, device=CUDA, generator=generator).to(FLOAT8) for _ in range(2)]
    table = torch.randperm(48, device=CUDA, generator=generator).view(4, 12)
    kernels = TritonKernels()
    for count in (1, 4, 16, 130, LENGTH):
        ends = torch.tensor([700, 768, 131, 701], device=CUDA).clamp(min=count)
        positions = torch.cat([torch.arange(end - count, end, device=CUDA) for end in ends])
        slots = torch.arange(4, device=CUDA).repeat_interleave(count)
        rows = AttentionRows(positions, slots, slots * 0, table, RowRuns.even(4, count))
        q = torch.randn(4 * count, shape.num_heads, shape.head_dim, device=CUDA).bfloat16()
        wide = LayerKV(*(one.bfloat16() for one in stored))
        expected = kernels.attention(q, shape, rows, wide)
        for _ in range(3):
            assert torch.equal(kernels.attention(q, shape, rows, LayerKV(*stored)), expected)


def latent_memory() -> LayerLatent:
    """Latents of the largest number, keys of NaN."""
    vectors = torch.full((NUM_BLOCKS, BLOCK_SIZE, RANK + ROPE), 0x7E, dtype=torch.uint8)
    vectors[..., RANK:] = 0x7F
    return LayerLatent(vectors.to(CUDA).view(FLOAT8), RANK, torch.tensor([0.3], device=CUDA))


def latent_rotary(weight: torch.Tensor, *, turns: bool = True) -> LatentRotary:
    angles = torch.rand(LENGTH, ROPE // 2, device=CUDA) if turns else torch.zeros(LENGTH, ROPE // 2)
    return LatentRotary(weight, 1e-6, angles.cos().to(CUDA), angles.sin().to(CUDA), True)


def test_bytes_of_latents_are_the_reference_s():
    """Latents are normed to numbers in the midst of those that round alike, and no key turns."""
    random = torch.Generator("cuda").manual_seed(0)
    size = (LENGTH, RANK + ROPE)
    latent = torch.randn(size, device=CUDA, generator=random) * 60
    latent[:, :RANK] = torch.randint(2, (LENGTH, RANK), device=CUDA, generator=random) * 2 - 1
    latent[0, -10:] = torch.tensor(
        [0.0, 2**-9, 2**-10, 3 * 2**-10, 448.0, 464.0, 465.0, 1e30, -17.0, 19.0], device=CUDA
    )
    codes = torch.arange(RANK, device=CUDA) % 127
    weight = codes.to(torch.uint8).view(FLOAT8).float() * 0.3 * 1.01
    weight[5] = 1e30
    rotary, rows, found = latent_rotary(weight, turns=False), rows_at(0, LENGTH), []
    for kernels in (TritonKernels().latent_rope_and_cache, latent_reference.rope_and_cache):
        memory, out = latent_memory(), torch.empty(LENGTH, HEADS, ROPE, device=CUDA)
        kernels(torch.zeros_like(out), latent, rotary, rows, memory, out)
        found.append(memory.vectors.view(torch.uint8))
    assert torch.equal(*found)
    assert len(found[0].unique()) > 200


def latent_steps(*sizes: int, fault: int | None = None) -> torch.Tensor:
    """Rows 0, 1, ... in steps of these sizes; Triton's forms of the last have the same bits."""
    torch.manual_seed(1)
    latent = torch.randn(LENGTH, RANK + ROPE, device=CUDA).bfloat16()
    queries = torch.randn(LENGTH, HEADS, RANK + ROPE, device=CUDA).bfloat16()
    rotary = latent_rotary((torch.rand(RANK, device=CUDA) + 0.5).bfloat16())
    if fault is not None:
        latent[fault, 7] = torch.nan
    kernels, memory, out, first = TritonKernels(), latent_memory(), [], 0
    for size in sizes:
        rows, q = rows_at(first, size), queries[first : first + size].clone()
        turned, part = q[..., RANK:], latent[first : first + size]
        kernels.latent_rope_and_cache(turned.clone(), part, rotary, rows, memory, turned)
        out.append(kernels.latent_attention(q, FACTOR, rows, memory))
        first += size
    # The engine's rows are Hopper's there; Triton's forms have one sum of their own.
    triton = [latent_triton.attention(q, FACTOR, rows, memory, config=one) for one in FORMS]
    for found in triton[1:]:
        torch.testing.assert_close(found, triton[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(triton[0].isnan(), out[-1].isnan())
    if fault is None:
        wanted = latent_reference.attention(q, FACTOR, rows, memory)
        for found in (out[-1], triton[0]):
            assert (found - wanted).float().norm() / wanted.float().norm() < 0.01
    return torch.cat(out)


def test_a_row_of_latents_has_the_same_bits_in_every_step_and_form():
    whole = latent_steps(LENGTH)
    assert not whole.isnan().any()
    assert torch.equal(latent_steps(300, 100, 200, 100), whole)
    assert torch.equal(latent_steps(600, *[5, 1] * 16, 4), whole)


def test_a_fault_in_a_latent_reaches_the_rows_that_see_it_alone():
    whole, found = latent_steps(LENGTH), latent_steps(300, 400, fault=350)
    assert torch.equal(found[:350], whole[:350])
    assert found[350:].isnan().all()

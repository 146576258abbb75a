"""Keys and values in float8 on a chip: the reference's bytes, and what reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RotaryTable, RowRuns
from sametoken.ops.model import norm_rope
from sametoken.ops.model.attention import reference
from sametoken.ops.model.attention.kv import FLOAT8, KVScales
from sametoken.ops.model.attention.triton import attention, choose
from sametoken.ops.triton import TritonKernels

SHAPE = AttentionShape(32, 8, 128)
BLOCK_SIZE, NUM_BLOCKS, LENGTH = 64, 12, 700
CUDA = torch.device("cuda")


def memory() -> LayerKV:
    """NaN everywhere."""
    size = (NUM_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    keys, values = (torch.full(size, 0x7F, dtype=torch.uint8, device=CUDA) for _ in range(2))
    k = torch.rand(SHAPE.num_kv_heads, device=CUDA) + 0.1
    return LayerKV(keys.view(FLOAT8), values.view(FLOAT8), KVScales(k, k / 3))


def rows_at(first: int, count: int) -> AttentionRows:
    positions = torch.arange(first, first + count, device=CUDA)
    table = torch.arange(NUM_BLOCKS, device=CUDA).flip(0)[None].contiguous()
    kv_slots = table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionRows(positions, positions * 0, kv_slots, table, RowRuns.even(1, count))


def fused(count: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    width = SHAPE.q_size + 2 * SHAPE.kv_size
    return torch.randn(count, width, device=CUDA, generator=generator).bfloat16()


def test_bytes_are_the_reference_s():
    """Nothing is rotated, so that the fp32 values are the same."""
    odd = [0.0, 2**-9, 2**-10, 3 * 2**-10, 448.0, 464.0, 465.0, 1e30, torch.inf, torch.nan]
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
        for form in ("sequential", "split_kv"):
            config = replace(chosen, form=form)
            assert torch.equal(attention(q, shape, rows, kv, config=config), out[-1])
        wanted = reference.attention(q, shape, rows, kv)
        assert (out[-1] - wanted).float().norm() / wanted.float().norm() < 0.01
        return torch.cat(out)

    whole = in_steps(LENGTH)
    assert not whole.isnan().any()
    assert torch.equal(in_steps(300, 100, 200, 100), whole)
    assert torch.equal(in_steps(600, *[5, 1] * 16, 4), whole)

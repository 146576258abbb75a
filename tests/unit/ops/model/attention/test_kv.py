"""Keys and values in float8: the bytes that are stored, and the bits of rows that read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.float8 import nearest, pool
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RotaryTable, RowRuns
from sametoken.ops.model import rope_triton
from sametoken.ops.model.attention.kv import FLOAT8, KVScales
from sametoken.ops.model.attention.triton import AttentionConfig, attention
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=24)
BLOCK_SIZE, NUM_BLOCKS = 16, 5
SCALES = KVScales(torch.tensor([0.3, 2.0]), torch.tensor([1.7, 0.01]))
#: Table width 0: keys are stored as they are.
NO_ROTATION = RotaryTable(torch.zeros(99, 0), torch.zeros(99, 0))
ROTARY = RotaryTable(*torch.rand(2, 99, 12, generator=torch.Generator().manual_seed(5)))
KERNELS = (NativeKernels(), ReferenceKernels())


def memory(scales=None, byte: int = 0x7F) -> LayerKV:
    """Memory of one byte, NaN by default."""
    size = (NUM_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    keys, values = (torch.full(size, byte, dtype=torch.uint8).view(FLOAT8) for _ in range(2))
    return LayerKV(keys, values, scales)


def rows_at(positions, slots=None) -> AttentionRows:
    """Rows of slot 0 by default; of two slots, whose blocks alternate."""
    positions = torch.as_tensor(positions)
    slots = torch.zeros_like(positions) if slots is None else torch.as_tensor(slots)
    table = torch.tensor([[3, 1, 4], [0, 2, 4]])
    blocks = table[slots, positions // BLOCK_SIZE]
    kv_slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionRows(positions, slots, kv_slots, table, RowRuns.even(1, len(positions)))


@pytest.mark.parametrize(("dtype", "scales"), [(torch.bfloat16, None), (torch.float32, SCALES)])
def test_every_implementation_stores_the_nearest_byte(dtype, scales):
    """Triton stores a value of NaN as 0 and its head's key as NaN, as Hopper's attention needs."""
    generator = torch.Generator().manual_seed(0)
    numbers, width = pool(generator).to(dtype), SHAPE.q_size + 2 * SHAPE.kv_size
    qkv = numbers[torch.randint(len(numbers), (9, width), generator=generator)]
    rows = rows_at(range(11, 20))
    parts = qkv.float().split((SHAPE.q_size, SHAPE.kv_size, SHAPE.kv_size), dim=1)
    places = rows.kv_slots // BLOCK_SIZE, slice(None), rows.kv_slots % BLOCK_SIZE
    keys, values = (part.unflatten(1, (2, -1)) for part in parts[1:])
    if scales is not None:
        keys, values = keys / scales.k[:, None], values / scales.v[:, None]
    wanted = nearest(keys), nearest(values)
    faults = values.isnan()
    hidden = (
        torch.where(faults.any(2, keepdim=True), 0x7F, wanted[0]),
        torch.where(faults, 0, wanted[1]),
    )
    found = []
    for write, expected in (
        *((one.rope_and_cache, wanted) for one in KERNELS),
        (rope_triton.rope_and_cache, hidden),
    ):
        kv = memory(scales, byte=0)
        write(qkv, SHAPE, NO_ROTATION, rows, kv, None)
        stored = torch.stack((kv.keys.view(torch.uint8), kv.values.view(torch.uint8)))
        for own, bytes_of in zip(stored, expected, strict=True):
            assert torch.equal(own[places], bytes_of.to(torch.uint8))
        found.append(stored)
    assert torch.equal(found[0], found[1])
    assert 0 < faults.any(2).sum() < faults.any(2).numel()
    assert len(found[0].unique()) > 100


def in_steps(kernels, qkv, sizes, scales, sinks, window=None):
    """Rows 0, 1, ... of slot 0 in steps of these sizes, over memory that is NaN elsewhere."""
    kv, out, first = memory(scales), [], 0
    shape = replace(SHAPE, sliding_window=window)
    for size in sizes:
        rows = rows_at(range(first, first + size))
        q = kernels.rope_and_cache(qkv[first : first + size], shape, ROTARY, rows, kv, None)
        out.append(kernels.attention(q, shape, rows, kv, sinks))
        first += size
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_a_row_reads_what_is_stored_in_any_step(kernels, dtype):
    """Of prompts, windows and single rows; whoever read its own step unrounded would differ."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(40, SHAPE.q_size + 2 * SHAPE.kv_size, generator=generator).to(dtype)
    sinks = torch.randn(SHAPE.num_heads, generator=generator)
    for options in ((None, None), (SCALES, sinks), (SCALES, None, 7)):
        alone = in_steps(kernels, qkv, [1] * 40, *options[:2], *options[2:])
        assert not alone.isnan().any()
        for sizes in ([40], [7, 9, 24], [33, 1, 5, 1]):
            assert torch.equal(in_steps(kernels, qkv, sizes, *options[:2], *options[2:]), alone)


def filled(scales) -> LayerKV:
    """Random finite numbers."""
    generator = torch.Generator().manual_seed(2)
    size = (2, NUM_BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    codes = torch.randint(256, size, generator=generator, dtype=torch.uint8) & 0xBF
    return LayerKV(codes[0].view(FLOAT8), codes[1].view(FLOAT8), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scales", [None, SCALES], ids=["ones", "scales"])
def test_what_is_read_is_the_number_times_its_scale(dtype, scales):
    kv, rows = filled(scales), rows_at([39, 38, 20], [0, 0, 1])
    k, v = (torch.ones(2), torch.ones(2)) if scales is None else scales
    keys, values = kv.keys.float() * k[:, None, None], kv.values.float() * v[:, None, None]
    wide = LayerKV(keys, values)
    q = torch.randn(3, SHAPE.num_heads, SHAPE.head_dim, generator=torch.Generator().manual_seed(3))
    q = q.to(dtype)
    wanted = ReferenceKernels().attention(q.float(), SHAPE, rows, wide)
    for kernels in KERNELS:
        got = kernels.attention(q, SHAPE, rows, kv).float()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


SEQUENTIAL = AttentionConfig("sequential", 16, num_warps=4, num_stages=2, split=32, tile=16)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (7, False)])
def test_triton_s_forms_agree_and_are_the_reference_s(window, has_sinks):
    """Memory behind the window and past the rows differs between the two scenes."""
    shape, kv = replace(SHAPE, sliding_window=window), filled(SCALES)
    rows = rows_at(range(36, 39))
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(3, SHAPE.num_heads, SHAPE.head_dim, generator=generator)
    sinks = torch.randn(SHAPE.num_heads, generator=generator) if has_sinks else None
    wanted = ReferenceKernels().attention(q, shape, rows, kv, sinks)
    one = replace(SEQUENTIAL, kv_left=bool(window))
    got = attention(q, shape, rows, kv, sinks, config=one)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    split = replace(one, form="split_kv", programs=48)
    assert torch.equal(attention(q, shape, rows, kv, sinks, config=split), got)
    everywhere = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    first = 36 + 1 - window if window else 0
    everywhere[rows_at(range(first, 39)).kv_slots] = True
    unseen = ~everywhere.view(NUM_BLOCKS, 1, BLOCK_SIZE, 1).expand(kv.keys.shape)
    kv.keys.view(torch.uint8)[unseen] = kv.values.view(torch.uint8)[unseen] = 0x7E
    assert torch.equal(attention(q, shape, rows, kv, sinks, config=one), got)


def test_the_kernels_compile_for_a_gpu(tmp_path):
    code = """
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, RotaryTable, RowRuns
from sametoken.ops.model import rope_triton
from sametoken.ops.model.attention.kv import FLOAT8, KVScales
from sametoken.ops.model.attention.triton import attention

shape, scales = AttentionShape(8, 2, 64), KVScales(torch.ones(2), torch.ones(2))
keys = torch.zeros(9, 2, 64, 64, dtype=FLOAT8)
kv, at = LayerKV(keys, keys.clone(), scales), torch.arange(2)
rows = AttentionRows(at, at * 0, at, torch.arange(9)[None], RowRuns.even(1, 2))
qkv = torch.zeros(2, 12 * 64, dtype=torch.bfloat16)
table = RotaryTable(torch.zeros(9, 32), torch.zeros(9, 32))
q = rope_triton.rope_and_cache(qkv, shape, table, rows, kv, None)
attention(q, shape, rows, kv)
"""
    compile_launches(code, tmp_path)

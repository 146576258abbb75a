"""Kept rows attend behind the kernels of their own pass that write KV below them, on Hopper."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionShape, KeptRows, LayerKV, LayerLatent, RowRuns
from sametoken.ops.model import embedding_triton
from sametoken.ops.model.attention import hopper
from sametoken.ops.model.latent_attention import hopper as latent
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

pytestmark = [
    # Beside other processes the kernel that reads too early may come late enough.
    pytest.mark.alone,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

LENGTH, BLOCK_SIZE = 300, 64
BLOCKS = -(-LENGTH // BLOCK_SIZE)
SHAPES = [AttentionShape(32, 8, 128), AttentionShape(16, 4, 256), AttentionShape(8, 2, 64)]


@triton.jit
def _copy_kernel(source, target, size, PDL: tl.constexpr, BLOCK: tl.constexpr):
    gdc_launch_and_wait(PDL)
    lane = tl.arange(0, BLOCK)
    for _ in range(8):
        tl.inline_asm_elementwise(
            "nanosleep.u32 500000; mov.b32 $0, $1;",
            "=r,r",
            [lane],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for at in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        tl.store(target + at + lane, tl.load(source + at + lane))


def copy_late(source: Tensor, target: Tensor) -> None:
    """Copy some milliseconds later, having let the next kernel start: KV may be written so.

    Few programs, as a kernel of much shared memory starts on multiprocessors without others only.
    """
    words, block = source.view(-1).view(torch.int32), 128
    assert len(words) % block == 0
    _copy_kernel[(16,)](
        words,
        target.view(-1).view(torch.int32),
        len(words),
        BLOCK=block,
        num_warps=4,
        **pdl_options(words),
    )


class Dense:
    """Attention of KV heads."""

    module: ModuleType = hopper

    def __init__(self, shape: AttentionShape) -> None:
        self.shape, self.arrived = shape, hopper.counters(torch.device("cuda"))
        size = (BLOCKS, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        self.written = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self.query_size = (shape.num_heads, shape.head_dim)

    def __call__(self, q: Tensor, rows: KeptRows, memory: list[Tensor]) -> Tensor:
        return hopper.attention(q, self.shape, rows, LayerKV(*memory), self.arrived)


class Latent:
    """Attention of latent vectors."""

    module: ModuleType = latent

    def __init__(self, heads: int) -> None:
        size = (BLOCKS, BLOCK_SIZE, latent.WIDTH)
        self.written = [torch.randn(size, device="cuda", dtype=torch.bfloat16)]
        self.query_size = (heads, latent.WIDTH)

    def __call__(self, q: Tensor, rows: KeptRows, memory: list[Tensor]) -> Tensor:
        return latent.attention(q, 0.05, rows, LayerLatent(*memory, latent.RANK))


CASES = [(Dense, shape) for shape in SHAPES] + [(Latent, 16), (Latent, 20)]


@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_a_kept_row_reads_what_its_own_pass_wrote_late(
    kind: Any, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = kind(sizes)
    queries = torch.randn(LENGTH, *attention.query_size, device="cuda").to(torch.bfloat16)
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    last = slot + LENGTH - 1
    table = torch.arange(BLOCKS, device="cuda").view(1, BLOCKS)
    rows = KeptRows(last, last, slot, table, RowRuns.even(1, 1))

    def late() -> Tensor:
        memory = [torch.zeros_like(written) for written in attention.written]
        torch.cuda.synchronize()
        for source, target in zip(attention.written, memory, strict=True):
            copy_late(source, target)
        q = embedding_triton.embedding(last, queries.flatten(1)).unflatten(1, queries.shape[1:])
        return attention(q, rows, memory)

    late()  # Compiles.
    expected = attention(queries[-1:].contiguous(), rows, attention.written)
    assert torch.equal(late(), expected)
    # Loads before the wait would read what was there before.
    monkeypatch.setattr(attention.module, "reads_earlier_passes", lambda rows: True)
    late()
    assert not torch.equal(late(), expected)

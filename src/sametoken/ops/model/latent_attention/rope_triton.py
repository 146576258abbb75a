"""Norm of a row's latent, rotation of its key and queries, and the one write, on a GPU."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionRows
from sametoken.ops.model.attention.kv_triton import as_bytes, as_stored
from sametoken.ops.model.latent_attention.shape import LatentRotary, LayerLatent
from sametoken.ops.model.norm_triton import aligned, in_aligned_memory
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_HEADS_PER_PROGRAM = 16


def rope_and_cache(
    q: Tensor,
    latent: Tensor,
    rotary: LatentRotary,
    rows: AttentionRows,
    memory: LayerLatent,
    out: Tensor,
) -> None:
    """See ``Kernels.latent_rope_and_cache``."""
    num_rows, heads, rope_dim = q.shape
    half, rank = rope_dim // 2, memory.rank
    assert latent.shape == (num_rows, rank + rope_dim)
    assert out.shape == q.shape
    assert memory.vectors.shape[2] == rank + rope_dim
    assert q.stride(2) == out.stride(2) == latent.stride(1) == 1
    for tensor in (rotary.weight, rotary.cos, rotary.sin, memory.vectors, rows.kv_slots):
        assert tensor.is_contiguous()
    # Unaligned memory would be compiled to code with other sums.
    latent = in_aligned_memory(latent)
    assert aligned(rotary.weight, memory.vectors)
    if not num_rows:
        return
    group = min(triton.next_power_of_2(heads), _HEADS_PER_PROGRAM)
    _rope_kernel[(num_rows, 1 + triton.cdiv(heads, group))](
        q,
        latent,
        rotary.weight,
        rotary.cos,
        rotary.sin,
        rows.positions,
        rows.kv_slots,
        as_bytes(memory.vectors),
        memory.scale,
        out,
        *q.stride()[:2],
        latent.stride(0),
        *out.stride()[:2],
        rotary.eps,
        HEADS=heads,
        RANK=rank,
        HALF=half,
        STEP=2 if rotary.interleaved else 1,
        OTHER=1 if rotary.interleaved else half,
        GROUP=group,
        RANK_BLOCK=triton.next_power_of_2(rank),
        HALF_BLOCK=triton.next_power_of_2(half),
        num_warps=4,
        **pdl_options(q),
    )


@triton.jit
def _finite(stored):
    if stored.dtype == tl.uint8:
        return (stored & 0x7F) != 0x7F
    else:
        return tl.abs(stored.to(tl.float32)) < float("inf")


@triton.jit
def _rope_kernel(
    q,  # [T, HEADS, 2 * HALF], strided
    latent,  # [T, RANK + 2 * HALF], strided
    weight,  # [RANK]
    cos,  # [max_positions, HALF]
    sin,
    positions,  # [T]
    kv_slots,  # [T]
    vectors,  # [num_blocks * block_size, RANK + 2 * HALF], float8 as bytes
    vector_scale,  # [1] fp32, or None
    out,  # [T, HEADS, 2 * HALF], strided
    q_row,
    q_head,
    latent_row,
    out_row,
    out_head,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    OTHER: tl.constexpr,
    GROUP: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    half = tl.arange(0, HALF_BLOCK)[None, :]
    inside = half < HALF
    c = tl.load(cos + position * HALF + half, inside, other=0.0)
    s = tl.load(sin + position * HALF + half, inside, other=0.0)
    if tl.program_id(1) == 0:
        _write_vector(
            latent + row * latent_row, vectors + tl.load(kv_slots + row) * (RANK + 2 * HALF),
            vector_scale, weight, eps, c, s, half, inside, RANK, HALF, RANK_BLOCK, STEP, OTHER,
        )  # fmt: skip
    else:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        present = inside & (head < HEADS)
        own = q + row * q_row + head * q_head
        target = out + row * out_row + head * out_head + half
        low, high = _rotated(own, half, present, c, s, STEP, OTHER)
        tl.store(target, low.to(out.dtype.element_ty), present)
        tl.store(target + HALF, high.to(out.dtype.element_ty), present)


@triton.jit
def _write_vector(
    source,  # [RANK + 2 * HALF]
    target,  # [RANK + 2 * HALF]
    vector_scale,
    weight,  # [RANK]
    eps,
    c,  # [1, HALF_BLOCK], as the three after it
    s,
    half,
    inside,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Norm the latent and rotate the key of one row.

    Attention multiplies latents that a query does not see by 0, so they are stored finite, and
    after a fault the key is NaN for the queries that do see it.
    """
    dtype = target.dtype.element_ty
    column = tl.arange(0, RANK_BLOCK)
    factor = tl.load(weight + column, column < RANK, other=0.0).to(tl.float32)
    value = tl.load(source + column, column < RANK, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / RANK + eps)
    normed = as_stored(value * scale * factor, vector_scale, 0, True, dtype)
    whole = tl.min(_finite(normed).to(tl.int32), axis=0) == 1
    tl.store(target + column, tl.where(_finite(normed), normed, 0), column < RANK)
    low, high = _rotated(source + RANK, half, inside, c, s, STEP, OTHER)
    low, high = tl.where(whole, low, float("nan")), tl.where(whole, high, float("nan"))
    at = target + RANK + half
    tl.store(at, as_stored(low, vector_scale, 0, True, dtype), inside)
    tl.store(at + HALF, as_stored(high, vector_scale, 0, True, dtype), inside)


@triton.jit
def _rotated(source, half, present, c, s, STEP: tl.constexpr, OTHER: tl.constexpr):
    """Rotate elements ``j * STEP`` with ``j * STEP + OTHER``."""
    low = tl.load(source + half * STEP, present, other=0.0).to(tl.float32)
    high = tl.load(source + half * STEP + OTHER, present, other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s

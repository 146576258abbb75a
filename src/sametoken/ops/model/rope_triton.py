"""Norms of heads, rotary embedding and the KV write in Triton, in one launch.

One program computes a number of heads, of as many rows as have them, so every sum has the same
layout for any number of rows.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.kv_triton import as_bytes, as_stored
from sametoken.ops.model.norm_triton import aligned
from sametoken.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_options

#: Elements of a program's heads, if it has several.
_ELEMENTS = 1024


@triton.jit
def _finite(value, dtype: tl.constexpr):
    """Whether ``as_stored`` makes a finite number of a value; in bytes infinity is the largest."""
    value = value.to(tl.float32)
    if dtype == tl.uint8:
        return value == value
    else:
        return tl.abs(value) < float("inf")


@triton.jit
def _norm_and_rotate(
    source,  # [HEADS, 1] pointers to the heads read
    target,  # [HEADS, 1] pointers to the heads written
    values,  # [HEADS, 1] pointers to the value heads of key heads, or None
    scales,  # [heads] of what is stored in bytes, or None
    head,  # [HEADS, 1]
    live,  # [HEADS, 1]
    weight,  # [D] or None
    cos,  # [HEADS, 1] pointers to those of the heads' positions
    sin,  # [HEADS, 1]
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm (if there is a weight) and rotate heads: element j pairs with j + HALF.

    A key head is NaN where its value head is not finite, for values are stored finite: Hopper's
    attention wants it.
    """
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    rotated = half < HALF
    c = tl.load(cos + half, live & rotated, other=0.0)
    s = tl.load(sin + half, live & rotated, other=0.0)
    if weight is not None:
        low_factor = tl.load(weight + half, rotated, other=0.0).to(tl.float32)
        high_factor = tl.load(weight + HALF + half, rotated, other=0.0).to(tl.float32)
        if 2 * HALF < D:
            rest_factor = tl.load(weight + rest, rest < D, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    low = tl.load(source + half, live & rotated, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + half, live & rotated, other=0.0).to(tl.float32)
    if 2 * HALF < D:
        tail = tl.load(source + rest, live & (rest < D), other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if 2 * HALF < D:
            squares += tl.sum(tail * tail, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        low = low * scale * low_factor
        high = high * scale * high_factor
        if 2 * HALF < D:
            tail = tail * scale * rest_factor
    dtype = target.dtype.element_ty
    if values is not None:
        column = tl.arange(0, D_BLOCK)[None, :]
        value = tl.load(values + column, live & (column < D), other=0.0)
        fault = tl.min(_finite(value, dtype).to(tl.int32), axis=1)[:, None] == 0
        low = tl.where(fault, float("nan"), low)
        high = tl.where(fault, float("nan"), high)
        if 2 * HALF < D:
            tail = tl.where(fault, float("nan"), tail)
    tl.store(
        target + half, as_stored(low * c - high * s, scales, head, live, dtype), live & rotated
    )
    tl.store(
        target + HALF + half,
        as_stored(high * c + low * s, scales, head, live, dtype),
        live & rotated,
    )
    if 2 * HALF < D:
        tl.store(target + rest, as_stored(tail, scales, head, live, dtype), live & (rest < D))


@triton.jit
def _heads_of(program, num_rows, COUNT: tl.constexpr, HEADS: tl.constexpr):
    """[HEADS] rows, heads of them, and whether those exist, of a program: COUNT heads a row."""
    place = program * HEADS + tl.arange(0, HEADS)
    return (place // COUNT).to(tl.int64), place % COUNT, place < num_rows * COUNT


@triton.jit(do_not_specialize=["num_rows"])
def _rope_and_cache_kernel(
    qkv,  # [T, (Q + 2 * KV) * D], rows qkv_stride apart
    q_out,  # [T, Q, D]
    keys,  # [num_blocks, KV, BLOCK_SIZE, D], float8 as bytes
    values,  # [num_blocks, KV, BLOCK_SIZE, D]
    k_scales,  # [KV], or None
    v_scales,  # [KV], or None
    cos,  # [max_positions, HALF]
    sin,  # [max_positions, HALF]
    positions,  # [T]
    kv_slots,  # [T]
    q_weight,  # [D] or None
    k_weight,  # [D] or None
    qkv_stride,
    num_rows,  # T
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_dependents(PDL)
    program = tl.program_id(0)
    q_programs = tl.cdiv(num_rows * Q, HEADS)
    kv_programs = tl.cdiv(num_rows * KV, HEADS)
    if program < q_programs:
        row, head, live = _heads_of(program, num_rows, Q, HEADS)
        turn = (tl.load(positions + row, live, other=0) * HALF)[:, None]
        row, head, live = row[:, None], head[:, None], live[:, None]
        _norm_and_rotate(
            qkv + row * qkv_stride + head * D, q_out + (row * Q + head) * D, None, None,
            head, live, q_weight, cos + turn, sin + turn,
            eps, D, HALF, D_BLOCK, HALF_BLOCK, REST_BLOCK, PDL,
        )  # fmt: skip
    elif KV:
        program -= q_programs
        row, head, live = _heads_of(program % kv_programs, num_rows, KV, HEADS)
        kv_slot = tl.load(kv_slots + row, live, other=0)
        turn = (tl.load(positions + row, live, other=0) * HALF)[:, None]
        block, offset = kv_slot // BLOCK_SIZE, kv_slot % BLOCK_SIZE
        written = (((block * KV + head) * BLOCK_SIZE + offset) * D)[:, None]
        row, head, live = row[:, None], head[:, None], live[:, None]
        key = qkv + row * qkv_stride + (Q + head) * D
        if program < kv_programs:
            _norm_and_rotate(
                key, keys + written, key + KV * D, k_scales,
                head, live, k_weight, cos + turn, sin + turn,
                eps, D, HALF, D_BLOCK, HALF_BLOCK, REST_BLOCK, PDL,
            )  # fmt: skip
        else:
            column = tl.arange(0, D_BLOCK)[None, :]
            inside = live & (column < D)
            gdc_wait(PDL)
            value = tl.load(key + KV * D + column, inside, other=0.0)
            dtype = values.dtype.element_ty
            value = tl.where(_finite(value, dtype), value, 0.0)
            stored = as_stored(value.to(tl.float32), v_scales, head, live, dtype)
            tl.store(values + written + column, stored, inside)


def rope_and_cache(
    qkv: Tensor,
    shape: AttentionShape,
    rotary: RotaryTable,
    rows: AttentionRows,
    kv: LayerKV,
    qk_norm: QKNorm | None,
) -> Tensor:
    """See ``Kernels.rope_and_cache``; ``qkv`` may be strided."""
    num_rows, half = qkv.shape[0], rotary.cos.shape[1]
    num_kv_heads, block_size, head_dim = kv.keys.shape[1:]
    assert qkv.shape[1] == shape.q_size + 2 * shape.kv_size
    assert (num_kv_heads, head_dim) == (shape.num_kv_heads, shape.head_dim)
    assert 2 * half <= head_dim
    assert qkv.stride(1) == 1
    for tensor in (rotary.cos, rotary.sin, rows.positions, rows.kv_slots, kv.keys, kv.values):
        assert tensor.is_contiguous()
    assert aligned(qkv, rotary.cos, rotary.sin, kv.keys, kv.values)

    q = qkv.new_empty(num_rows, shape.num_heads, head_dim)
    block = next_power_of_2(head_dim)
    heads = max(_ELEMENTS // block, 1)
    counts = shape.num_heads, num_kv_heads, num_kv_heads
    if num_rows:
        _rope_and_cache_kernel[(sum(cdiv(num_rows * count, heads) for count in counts),)](
            qkv,
            q,
            as_bytes(kv.keys),
            as_bytes(kv.values),
            kv.k_scales,
            kv.v_scales,
            rotary.cos,
            rotary.sin,
            rows.positions,
            rows.kv_slots,
            qk_norm.q_weight if qk_norm else None,
            qk_norm.k_weight if qk_norm else None,
            qkv.stride(0),
            num_rows,
            qk_norm.eps if qk_norm else 0.0,
            Q=shape.num_heads,
            KV=num_kv_heads,
            D=head_dim,
            HALF=half,
            BLOCK_SIZE=block_size,
            HEADS=heads,
            D_BLOCK=block,
            HALF_BLOCK=next_power_of_2(max(half, 1)),
            REST_BLOCK=next_power_of_2(max(head_dim - 2 * half, 1)),
            num_warps=4,
            **pdl_options(qkv),
        )
    return q

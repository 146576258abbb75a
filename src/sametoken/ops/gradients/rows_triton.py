"""Gradients of norms, rotary embedding and ``silu_mul`` in Triton, each rounded once.

Gradients of a norm's weight are summed by programs over rows that are ``PROGRAMS`` apart, and then
over programs: in one order, whatever runs beside them.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionShape, QKNorm, RotaryTable
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.triton_versions import FUSED

#: Programs of a launch that sums over rows: four for each multiprocessor.
PROGRAMS = 528
_BLOCK = 1024


def norm_gradients(
    x: Tensor, weight: Tensor, eps: float, of: Tensor, of_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm`` for x and its weight.

    Args:
        x: [T, width], what was normed.
        weight: [width].
        eps: the norm's.
        of: [T, width], the gradient of the norm.
        of_x: [T, width], added to the gradient of x.
    """
    x, (rows, width) = x.contiguous(), x.shape
    programs = min(rows, PROGRAMS)
    by_x = torch.empty_like(x)
    by_weight = x.new_empty(programs, width, dtype=torch.float32)
    block = next_power_of_2(width)
    _norm_kernel[(programs,)](
        x,
        weight,
        of.contiguous(),
        None if of_x is None else of_x.contiguous(),
        by_x,
        by_weight,
        rows,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **FUSED,
    )
    return by_x, by_weight.sum(dim=0).to(weight.dtype)


def rotary_gradients(
    qkv: Tensor,
    shape: AttentionShape,
    rotary: RotaryTable,
    positions: Tensor,
    qk_norm: QKNorm | None,
    of: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Gradients of ``normed_and_rotated``: for qkv, and for the weights of q and k if normed.

    Args:
        qkv: [T, q|k|v].
        shape: of the layer.
        rotary: the layer's.
        positions: [T].
        qk_norm: the layer's.
        of: of q, k and v, [T, heads, head_dim] each.
    """
    rows, dim, half = qkv.shape[0], shape.head_dim, rotary.cos.shape[1]
    programs = min(rows, PROGRAMS)
    by_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    by_weights = None
    if qk_norm is not None:
        weights = (qk_norm.q_weight, qk_norm.k_weight)
        by_weights = torch.empty(2, programs, dim, dtype=torch.float32, device=qkv.device)
    _qkv_kernel[(programs, 3)](
        qkv,
        by_qkv,
        rotary.cos,
        rotary.sin,
        positions,
        *weights,
        *(one.contiguous() for one in of),
        by_weights,
        rows,
        qkv.stride(0),
        0.0 if qk_norm is None else qk_norm.eps,
        Q=shape.num_heads,
        KV=shape.num_kv_heads,
        D=dim,
        HALF=half,
        Q_BLOCK=next_power_of_2(shape.num_heads),
        KV_BLOCK=next_power_of_2(max(shape.num_kv_heads, 1)),
        VALUES_BLOCK=next_power_of_2(max(shape.kv_size, 1)),
        HALF_BLOCK=next_power_of_2(max(half, 1)),
        REST_BLOCK=next_power_of_2(max(dim - 2 * half, 1)),
        num_warps=8,
        **FUSED,
    )
    if qk_norm is None or by_weights is None:
        return (by_qkv,)
    return by_qkv, *by_weights.sum(dim=1).to(qk_norm.q_weight.dtype).unbind(0)


def silu_mul_gradient(gate_up: Tensor, of: Tensor) -> Tensor:
    """The gradient of ``silu_mul`` for [T, gate|up], of that of its result, [T, width]."""
    gate_up, (rows, width) = gate_up.contiguous(), of.shape
    by_gate_up = torch.empty_like(gate_up)
    _silu_mul_kernel[(rows, cdiv(width, _BLOCK))](
        gate_up,
        of.contiguous(),
        by_gate_up,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
        **FUSED,
    )
    return by_gate_up


@triton.jit
def _norm_kernel(
    x,  # [rows, WIDTH], as of, of_x and by_x
    weight,  # [WIDTH]
    of,
    of_x,  # or None
    by_x,
    by_weight,  # [programs, WIDTH] fp32
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * WIDTH + column
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        given = tl.load(of + at, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        normed = value * scale
        total += given * normed
        given *= factor
        found = (given - normed * (tl.sum(given * normed, axis=0) / WIDTH)) * scale
        if of_x is not None:
            found += tl.load(of_x + at, inside, other=0.0).to(tl.float32)
        tl.store(by_x + at, found.to(by_x.dtype.element_ty), inside)
    tl.store(by_weight + tl.program_id(0) * WIDTH + column, total, inside)


@triton.jit
def _through_norm(
    low,
    high,
    tail,
    x_low,
    x_high,
    x_rest,
    low_factor,
    high_factor,
    rest_factor,
    eps,
    D: tl.constexpr,
):
    """Gradients of heads [HEADS, columns] before their norm, and of its weight [columns].

    Heads come in three parts, as do their gradients after the norm and the weight.
    """
    squares = tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)
    scale = tl.rsqrt((squares + tl.sum(x_rest * x_rest, axis=1)) / D + eps)[:, None]
    x_low *= scale
    x_high *= scale
    x_rest *= scale
    by_low = tl.sum(low * x_low, axis=0)
    by_high = tl.sum(high * x_high, axis=0)
    by_rest = tl.sum(tail * x_rest, axis=0)
    low *= low_factor
    high *= high_factor
    tail *= rest_factor
    shared = tl.sum(low * x_low, axis=1) + tl.sum(high * x_high, axis=1)
    shared = ((shared + tl.sum(tail * x_rest, axis=1)) / D)[:, None]
    low = (low - x_low * shared) * scale
    high = (high - x_high * shared) * scale
    tail = (tail - x_rest * shared) * scale
    return low, high, tail, by_low, by_high, by_rest


@triton.jit
def _heads(
    source,  # [rows, HEADS * D], rows source_stride apart
    target,  # [rows, HEADS * D], rows target_stride apart, written
    cos,  # as for _qkv_kernel
    sin,
    positions,
    weight,  # [D], or None
    of,  # [rows, HEADS, D]
    by_weight,  # [programs, D] fp32, or None
    rows,
    source_stride,
    target_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Heads of q or of k, of the rows of a program."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    rotated = (head < HEADS) & (half < HALF)
    kept = (head < HEADS) & (rest < D)
    if weight is not None:
        low_factor = tl.load(weight + half, half < HALF, other=0.0).to(tl.float32)
        high_factor = tl.load(weight + HALF + half, half < HALF, other=0.0).to(tl.float32)
        rest_factor = tl.load(weight + rest, rest < D, other=0.0).to(tl.float32)
        low_total = tl.zeros([HALF_BLOCK], tl.float32)
        high_total = tl.zeros([HALF_BLOCK], tl.float32)
        rest_total = tl.zeros([REST_BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        position = tl.load(positions + row)
        c = tl.load(cos + position * HALF + half, half < HALF, other=0.0)
        s = tl.load(sin + position * HALF + half, half < HALF, other=0.0)
        given = of + tl.cast(row, tl.int64) * HEADS * D + head * D
        first = tl.load(given + half, rotated, other=0.0).to(tl.float32)
        second = tl.load(given + HALF + half, rotated, other=0.0).to(tl.float32)
        tail = tl.load(given + rest, kept, other=0.0).to(tl.float32)
        low = first * c + second * s
        high = second * c - first * s
        if weight is not None:
            at = source + tl.cast(row, tl.int64) * source_stride + head * D
            x_low = tl.load(at + half, rotated, other=0.0).to(tl.float32)
            x_high = tl.load(at + HALF + half, rotated, other=0.0).to(tl.float32)
            x_rest = tl.load(at + rest, kept, other=0.0).to(tl.float32)
            low, high, tail, by_low, by_high, by_rest = _through_norm(
                low, high, tail, x_low, x_high, x_rest, low_factor, high_factor, rest_factor, eps, D
            )
            low_total += by_low
            high_total += by_high
            rest_total += by_rest
        at = target + tl.cast(row, tl.int64) * target_stride + head * D
        tl.store(at + half, low.to(target.dtype.element_ty), rotated)
        tl.store(at + HALF + half, high.to(target.dtype.element_ty), rotated)
        tl.store(at + rest, tail.to(target.dtype.element_ty), kept)
    if weight is not None:
        at = by_weight + tl.program_id(0) * D
        tl.store(at + half, low_total[None, :], half < HALF)
        tl.store(at + HALF + half, high_total[None, :], half < HALF)
        tl.store(at + rest, rest_total[None, :], rest < D)


@triton.jit
def _qkv_kernel(
    qkv,  # [rows, (Q + 2 * KV) * D], rows qkv_stride apart
    by_qkv,  # [rows, (Q + 2 * KV) * D], written
    cos,  # [max_positions, HALF]
    sin,
    positions,  # [rows]
    q_weight,  # [D], or None, as k_weight
    k_weight,
    of_q,  # [rows, Q, D]
    of_k,  # [rows, KV, D], as of_v
    of_v,
    by_weights,  # [2, programs, D] fp32, or None
    rows,
    qkv_stride,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    VALUES_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    WIDTH: tl.constexpr = (Q + 2 * KV) * D
    part = tl.program_id(1)
    if part == 0:
        _heads(
            qkv, by_qkv, cos, sin, positions, q_weight, of_q, by_weights, rows, qkv_stride, WIDTH,
            eps, Q, D, HALF, Q_BLOCK, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif part == 1:
        by_k_weight = None
        if by_weights is not None:
            by_k_weight = by_weights + tl.num_programs(0) * D
        _heads(
            qkv + Q * D, by_qkv + Q * D, cos, sin, positions, k_weight, of_k, by_k_weight, rows,
            qkv_stride, WIDTH, eps, KV, D, HALF, KV_BLOCK, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        column = tl.arange(0, VALUES_BLOCK)
        inside = column < KV * D
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            at = tl.cast(row, tl.int64)
            value = tl.load(of_v + at * KV * D + column, inside, other=0.0)
            target = by_qkv + at * WIDTH + (Q + KV) * D + column
            tl.store(target, value.to(by_qkv.dtype.element_ty), inside)


@triton.jit
def _silu_mul_kernel(
    gate_up,  # [T, 2 * WIDTH], as by_gate_up
    of,  # [T, WIDTH]
    by_gate_up,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * 2 * WIDTH + column
    gate = tl.load(gate_up + at, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, inside, other=0.0).to(tl.float32)
    given = tl.load(of + row * WIDTH + column, inside, other=0.0).to(tl.float32)
    part = 1.0 / (1.0 + tl.exp(-gate))
    dtype = by_gate_up.dtype.element_ty
    by_gate = given * up * part * (1.0 + gate * (1.0 - part))
    tl.store(by_gate_up + at, by_gate.to(dtype), inside)
    tl.store(by_gate_up + at + WIDTH, (given * gate * part).to(dtype), inside)

"""RMS norms, rotary embedding and the KV write in Triton.

One program computes whole rows (or whole heads of one row) and its shape depends on the row's
width only, so every sum has the same layout for any number of rows.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.kv_triton import as_bytes, as_stored
from sametoken.ops.pdl import gdc_launch_and_wait, gdc_launch_dependents, gdc_wait, pdl_options

_MAX_HEADS_PER_PROGRAM = 8
_ELEMENTS_PER_WARP = 512
_GATED_ELEMENTS = 1024


@triton.jit
def store_normed(
    out,  # [WIDTH], written
    value,  # [BLOCK] fp32, 0 beyond WIDTH
    factor,  # [BLOCK] fp32
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one normed row times ``factor``."""
    columns = tl.arange(0, BLOCK)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    tl.store(out + columns, (value * scale * factor).to(out.dtype.element_ty), columns < WIDTH)


@triton.jit
def _rms_norm_kernel(
    x,  # [T, WIDTH]
    x_stride,  # elements from a row of x to the next; None: WIDTH
    residual,  # [T, WIDTH] or None
    weight,  # [WIDTH]
    out,  # [T, WIDTH], may be x
    total,  # [T, WIDTH], written: x + residual; may be residual; None without
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    factor = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    gdc_launch_and_wait(PDL)
    x_start = start if x_stride is None else tl.program_id(0).to(tl.int64) * x_stride
    value = tl.load(x + x_start + columns, inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = value + tl.load(residual + start + columns, inside, other=0.0).to(tl.float32)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, inside)
        value = rounded.to(tl.float32)
    store_normed(out + start, value, factor, eps, WIDTH, BLOCK)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``Kernels.rms_norm``."""
    if (x.stride(0) | x.shape[1]) % 16 or not aligned(x):
        x = x.contiguous()  # Rows at other addresses would be compiled to code with other sums.
    out = x.new_empty(x.shape)
    _launch_rms_norm(x, weight, eps, out)
    return out


@triton.jit
def _gated_rms_norm_kernel(
    x,  # [T, HEADS, D]
    gate,  # [T, HEADS, D], rows gate_stride apart
    weight,  # [D]
    out,  # [T, HEADS, D]
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < D)
    factor = tl.load(weight + column, column < D, other=0.0).to(tl.float32)
    gdc_launch_and_wait(PDL)
    at = (row * HEADS + head) * D + column
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + head * D + column, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    normed = value * scale * factor * (g / (1.0 + tl.exp(-g)))
    tl.store(out + at, normed.to(out.dtype.element_ty), inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``Kernels.gated_rms_norm``."""
    num_rows, dim = x.shape[0], weight.shape[0]
    heads = x.shape[1] // dim
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert gate.shape == x.shape == (num_rows, heads * dim)
    assert weight.is_contiguous()
    assert aligned(x, weight)
    out = torch.empty_like(x)
    block = next_power_of_2(dim)
    group = min(next_power_of_2(heads), max(_GATED_ELEMENTS // block, 1))
    if num_rows:
        _gated_rms_norm_kernel[(num_rows, cdiv(heads, group))](
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            HEADS=heads,
            D=dim,
            GROUP=group,
            BLOCK=block,
            num_warps=4,
            **pdl_options(x),
        )
    return out


@triton.jit
def _gated_group_norm_kernel(
    x,  # [T, GROUPS, D]
    gate,  # [T, GROUPS, D], rows gate_stride apart
    weight,  # [GROUPS, D]
    out,  # [T, GROUPS, D]
    gate_stride,
    eps,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < D
    factor = tl.load(weight + group * D + column, inside, other=0.0).to(tl.float32)
    gdc_launch_and_wait(PDL)
    start = (row * GROUPS + group) * D
    value = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + group * D + column, inside, other=0.0).to(tl.float32)
    store_normed(out + start, value * (g / (1.0 + tl.exp(-g))), factor, eps, D, BLOCK)


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float
) -> Tensor:
    """See ``Kernels.gated_group_norm``; ``gate`` may be strided."""
    num_rows, width = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert gate.shape == x.shape
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    assert width % num_groups == 0
    assert aligned(x, weight)
    out = torch.empty_like(x)
    program = row_program(width // num_groups)
    if num_rows:
        _gated_group_norm_kernel[(num_rows, num_groups)](
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            GROUPS=num_groups,
            D=program["WIDTH"],
            BLOCK=program["BLOCK"],
            num_warps=program["num_warps"],
            **pdl_options(x),
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``Kernels.add_rms_norm``; writes its results into ``x`` and ``residual``."""
    _launch_rms_norm(x, weight, eps, x, residual, residual)
    return x, residual


def add_rms_norm_apart(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` that writes to no argument."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch_rms_norm(x, weight, eps, out, residual, total)
    return out, total


def _launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert aligned(x, out, weight)
    if residual is not None:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        assert aligned(residual)
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    if num_rows:
        x_stride = None if x.is_contiguous() else x.stride(0)
        _rms_norm_kernel[(num_rows,)](
            x, x_stride, residual, weight, out, total, eps, **row_program(width), **pdl_options(x)
        )


def row_program(width: int) -> dict[str, int]:
    """Launch options of a program that norms one row; they fix the layout of its sum."""
    block = next_power_of_2(width)
    num_warps = min(max(block // _ELEMENTS_PER_WARP, 1), 16)
    return {"WIDTH": width, "BLOCK": block, "num_warps": num_warps}


def aligned(*tensors: Tensor) -> bool:
    """Whether all are 16-byte aligned; others would be compiled to code with other sums."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


@triton.jit
def _finite(value):
    return tl.abs(value.to(tl.float32)) < float("inf")


@triton.jit
def _norm_and_rotate(
    source,  # [HEADS, 1] pointers to the heads read
    target,  # [HEADS, 1] pointers to the heads written
    values,  # [HEADS, 1] pointers to the value heads of key heads, or None
    scales,  # [heads] of what is stored in bytes, or None
    head,  # [HEADS, 1]
    live,  # [HEADS, 1]
    weight,  # [D] or None
    cos,  # [HALF] of the row's position
    sin,  # [HALF] of the row's position
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
    attention wants it, which reads no bytes.
    """
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    rotated = half < HALF
    c = tl.load(cos + half, rotated, other=0.0)
    s = tl.load(sin + half, rotated, other=0.0)
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
    if values is not None and dtype != tl.uint8:
        column = tl.arange(0, D_BLOCK)[None, :]
        value = tl.load(values + column, live & (column < D), other=0.0)
        fault = tl.min(_finite(value).to(tl.int32), axis=1)[:, None] == 0
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
    Q_PROGRAMS: tl.constexpr = (Q + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (KV + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    source = qkv + row * qkv_stride
    position = tl.load(positions + row)
    cos += position * HALF
    sin += position * HALF
    if program < Q_PROGRAMS:
        head += program * HEADS
        _norm_and_rotate(
            source + head * D, q_out + (row * Q + head) * D, None, None,
            head, head < Q, q_weight, cos, sin,
            eps, D, HALF, D_BLOCK, HALF_BLOCK, REST_BLOCK, PDL,
        )  # fmt: skip
    else:
        kv_slot = tl.load(kv_slots + row)
        block, offset = kv_slot // BLOCK_SIZE, kv_slot % BLOCK_SIZE
        if program < Q_PROGRAMS + KV_PROGRAMS:
            head += (program - Q_PROGRAMS) * HEADS
            written = ((block * KV + head) * BLOCK_SIZE + offset) * D
            _norm_and_rotate(
                source + (Q + head) * D, keys + written, source + (Q + KV + head) * D, k_scales,
                head, head < KV, k_weight, cos, sin,
                eps, D, HALF, D_BLOCK, HALF_BLOCK, REST_BLOCK, PDL,
            )  # fmt: skip
        else:
            head += (program - Q_PROGRAMS - KV_PROGRAMS) * HEADS
            written = ((block * KV + head) * BLOCK_SIZE + offset) * D
            column = tl.arange(0, D_BLOCK)[None, :]
            inside = (head < KV) & (column < D)
            gdc_wait(PDL)
            value = tl.load(source + (Q + KV + head) * D + column, inside, other=0.0)
            if values.dtype.element_ty != tl.uint8:
                value = tl.where(_finite(value), value, 0.0)
            dtype = values.dtype.element_ty
            stored = as_stored(value.to(tl.float32), v_scales, head, head < KV, dtype)
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
    heads = min(next_power_of_2(max(num_kv_heads, 1)), _MAX_HEADS_PER_PROGRAM)
    programs = cdiv(shape.num_heads, heads) + 2 * cdiv(num_kv_heads, heads)
    if num_rows:
        _rope_and_cache_kernel[(num_rows, programs)](
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
            qk_norm.eps if qk_norm else 0.0,
            Q=shape.num_heads,
            KV=num_kv_heads,
            D=head_dim,
            HALF=half,
            BLOCK_SIZE=block_size,
            HEADS=heads,
            D_BLOCK=next_power_of_2(head_dim),
            HALF_BLOCK=next_power_of_2(max(half, 1)),
            REST_BLOCK=next_power_of_2(max(head_dim - 2 * half, 1)),
            num_warps=4,
            **pdl_options(qkv),
        )
    return q

"""RMS norms in Triton.

One program computes a whole row, or whole heads of one row, and its shape depends on the row's
width only, so every sum has the same layout for any number of rows.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.gemm.fp8 import GROUP
from sametoken.ops.model.gemm.fp8_triton import rounded_lines, store_rounded
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import BY_ROW, RoundedRows, Rounding

_ELEMENTS_PER_WARP = 512
_GATED_ELEMENTS = 1024


@triton.jit
def _scale_of(value, eps, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)


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
    scale = _scale_of(value, eps, WIDTH)
    tl.store(out + columns, (value * scale * factor).to(out.dtype.element_ty), columns < WIDTH)


@triton.jit
def _rms_norm_kernel(
    x,  # [T, WIDTH]
    x_stride,  # elements from a row of x to the next; None: WIDTH
    residual,  # [T, WIDTH] or None
    weight,  # [WIDTH]
    out,  # [T, WIDTH], may be x
    total,  # [T, WIDTH], written: x + residual; may be residual; None without
    row_scale,  # [T, groups], written: of rows that are rounded to out's float8; None: they are not
    eps,
    GROUP: tl.constexpr,  # elements that share a scale; 0: a row's
    POWERS: tl.constexpr,  # scales of groups are powers of two
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    factor = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    gdc_launch_and_wait(PDL)
    x_start = start if x_stride is None else row * x_stride
    value = tl.load(x + x_start + columns, inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = value + tl.load(residual + start + columns, inside, other=0.0).to(tl.float32)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, inside)
        value = rounded.to(tl.float32)
    if row_scale is None:
        store_normed(out + start, value, factor, eps, WIDTH, BLOCK)
    else:
        normed = (value * _scale_of(value, eps, WIDTH) * factor).to(x.dtype.element_ty)
        normed = normed.to(tl.float32)
        if GROUP:
            scales = row_scale + row * tl.cdiv(WIDTH, GROUP)
            _store_groups(out + start, scales, normed, GROUP, POWERS, WIDTH)
            return
        # A thread with 16 elements to store would load 16 to add: as many as of x keep the sum.
        at = tl.max_contiguous(out + start + columns, 128 // x.dtype.element_ty.primitive_bitwidth)
        store_rounded(at, row_scale + row, normed, inside)


@triton.jit
def _store_groups(
    out,  # [WIDTH] float8, written
    scales,  # [groups], written
    value,  # [BLOCK] fp32, 0 beyond WIDTH
    GROUP: tl.constexpr,
    POWERS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store a row as ``rounded`` makes it by groups."""
    LINES: tl.constexpr = value.shape[0] // GROUP
    line = tl.arange(0, LINES)[:, None]
    column = line * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < WIDTH
    # Beyond a row with NaN there is NaN, too.
    lines = tl.where(inside, tl.reshape(value, [LINES, GROUP]), 0.0)
    lines, step = rounded_lines(lines, POWERS)
    tl.store(out + column, lines.to(out.dtype.element_ty), inside)
    tl.store(scales + line, step, line * GROUP < WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``Kernels.rms_norm``."""
    x = in_aligned_memory(x)
    if (x.stride(0) | x.shape[1]) % 16:
        x = x.contiguous()  # Rows at other addresses may be compiled to code with other sums.
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
    WIDTH: tl.constexpr,  # D
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + group * WIDTH + column, inside, other=0.0).to(tl.float32)
    gdc_launch_and_wait(PDL)
    start = (row * GROUPS + group) * WIDTH
    value = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
    at = row * gate_stride + group * WIDTH + column
    g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    store_normed(out + start, value * (g / (1.0 + tl.exp(-g))), factor, eps, WIDTH, BLOCK)


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
    options = row_program(width // num_groups) | pdl_options(x)
    if num_rows:
        _gated_group_norm_kernel[(num_rows, num_groups)](
            x, gate, weight, out, gate.stride(0), eps, GROUPS=num_groups, **options
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


def rounding_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rounding: Rounding = BY_ROW,
) -> tuple[RoundedRows, Tensor]:
    """See ``Kernels.rounding_rms_norm``; writes the sum into ``residual``."""
    assert rounding.is_dynamic
    rows, width = x.shape
    shape = (rows, cdiv(width, GROUP)) if rounding.grouped else (rows,)
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch_rms_norm(x, weight, eps, values, residual, residual, scale, rounding)
    return RoundedRows(values, scale, x.dtype), x if residual is None else residual


def _launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    row_scale: Tensor | None = None,
    rounding: Rounding = BY_ROW,
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
        program = row_program(width)
        group = min(GROUP, program["BLOCK"]) if rounding.grouped else 0
        _rms_norm_kernel[(num_rows,)](
            x, x_stride, residual, weight, out, total, row_scale, eps,
            GROUP=group, POWERS=rounding.powers, **program, **pdl_options(x),
        )  # fmt: skip


def row_program(width: int) -> dict[str, int]:
    """Launch options of a program that norms one row; they fix the layout of its sum."""
    block = next_power_of_2(width)
    num_warps = min(max(block // _ELEMENTS_PER_WARP, 1), 16)
    return {"WIDTH": width, "BLOCK": block, "num_warps": num_warps}


def in_aligned_memory(x: Tensor) -> Tensor:
    """The tensor, or a copy of one whose first element is not 16-byte aligned."""
    # ``contiguous`` would not copy a single row.
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def aligned(*tensors: Tensor) -> bool:
    """Whether all are 16-byte aligned; others would be compiled to code with other sums."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)

"""Activations in Triton."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_BLOCK = 1024


@triton.jit
def clamped_swiglu_of(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """``Kernels.clamped_swiglu`` of fp32 values; NaN stays NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return gate / (1.0 + tl.exp(-(ALPHA * gate))) * (up + 1.0)


@triton.jit
def gelu_of(gate):
    """gelu of fp32 values, as in ``Kernels.gelu_mul``."""
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-slope))


@triton.jit
def activated(
    sums,
    up,
    dtype: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu_mul", "gelu_mul", "clamped_swiglu" or "relu_squared"
    ALPHA: tl.constexpr = 0.0,  # of "clamped_swiglu", as is LIMIT
    LIMIT: tl.constexpr = 0.0,
):
    """The activation in fp32, of sums rounded to ``dtype``: fused and unfused bits are the same."""
    rounded = sums.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        return clamped_swiglu_of(rounded, up.to(dtype).to(tl.float32), ALPHA, LIMIT)
    elif ACTIVATION == "gelu_mul":
        return gelu_of(rounded) * up.to(dtype).to(tl.float32)
    elif ACTIVATION == "silu_mul":
        return rounded / (1.0 + tl.exp(-rounded)) * up.to(dtype).to(tl.float32)
    else:
        return tl.where(rounded < 0.0, 0.0, rounded * rounded)


@dataclass(frozen=True, slots=True)
class Activation:
    """What follows a product of experts; ``alpha`` and ``limit`` are those of "clamped_swiglu"."""

    name: str
    alpha: float = 0.0
    limit: float = 0.0

    def of(self, sums: Tensor) -> Tensor:
        """Of rounded sums, [T, 2I] with gates, with the bits of ``activated``: [T, I]."""
        if self.name == "relu_squared":
            return relu_squared(sums)
        return _gated(sums, self.name, self.alpha, self.limit)


@triton.jit
def _gated_kernel(
    gate_up,  # [T, 2 * WIDTH]
    out,  # [T, WIDTH]
    KIND: tl.constexpr,  # as for ``activated``, as are the next two
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * 2 * WIDTH + columns
    gate = tl.load(source, inside, other=0.0)
    up = tl.load(source + WIDTH, inside, other=0.0)
    dtype = out.dtype.element_ty
    value = activated(gate, up, dtype, KIND, ALPHA, LIMIT)
    tl.store(out + row * WIDTH + columns, value.to(dtype), inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``activation.silu_mul``."""
    return _gated(gate_up, "silu_mul")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See ``Kernels.gelu_mul``."""
    return _gated(gate_up, "gelu_mul")


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """See ``Kernels.clamped_swiglu``."""
    return _gated(gate_up, "clamped_swiglu", alpha, limit)


def _gated(gate_up: Tensor, kind: str, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _gated_kernel[grid](
            gate_up,
            out,
            KIND=kind,
            ALPHA=alpha,
            LIMIT=limit,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(gate_up),
        )
    return out


@triton.jit
def _soft_cap_kernel(
    logits,  # [L, WIDTH] fp32
    out,  # [L, WIDTH] fp32
    cap,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + columns
    value = tl.load(logits + place, inside, other=0.0)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), also where exp is infinite.
    value = cap - 2.0 * cap / (tl.exp(2.0 * value / cap) + 1.0)
    tl.store(out + place, value, inside)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """See ``Kernels.soft_cap``."""
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    num_rows, width = logits.shape
    out = torch.empty_like(logits)
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _soft_cap_kernel[grid](
            logits, out, cap, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **pdl_options(logits)
        )
    return out


@triton.jit
def _sigmoid_mul_kernel(
    x,  # [T, WIDTH]
    gate,  # [T, WIDTH], rows gate_stride apart; or [T, 1]
    out,  # [T, WIDTH]
    gate_stride,
    GATE_STEP: tl.constexpr,  # elements from a column of gate to the next
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = row * WIDTH + columns
    gate_at = gate + row * gate_stride + columns * GATE_STEP
    g = tl.load(gate_at, inside, other=0.0).to(tl.float32)
    value = tl.load(x + place, inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-g))
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See ``Kernels.sigmoid_mul``; ``gate`` may be strided, or expanded from [T, 1]."""
    num_rows, width = x.shape
    assert x.is_contiguous()
    assert gate.shape == x.shape
    # Contiguous tensors without rows may have any stride.
    assert gate.stride(1) in (0, 1) or not num_rows
    out = torch.empty_like(x)
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _sigmoid_mul_kernel[grid](
            x,
            gate,
            out,
            gate.stride(0),
            GATE_STEP=gate.stride(1),
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(x),
        )
    return out


@triton.jit
def _relu_squared_kernel(
    x,  # [T, WIDTH]
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = row * WIDTH + columns, columns < WIDTH
    dtype = out.dtype.element_ty
    value = tl.load(x + place, inside, other=0.0)
    value = activated(value, value, dtype, "relu_squared")
    tl.store(out + place, value.to(dtype), inside)


def relu_squared(x: Tensor) -> Tensor:
    """See ``Kernels.relu_squared``."""
    assert x.is_contiguous()
    num_rows, width = x.shape
    out = torch.empty_like(x)
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _relu_squared_kernel[grid](x, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **pdl_options(x))
    return out

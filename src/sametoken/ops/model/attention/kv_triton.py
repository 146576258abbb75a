"""How Triton kernels write and read keys and values: in memory's dtype, or as bytes of e4m3."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.attention.kv import FLOAT8


def as_bytes(memory: Tensor) -> Tensor:
    """KV memory as kernels take it: float8 as bytes."""
    return memory.view(torch.uint8) if memory.dtype == FLOAT8 else memory


@triton.jit
def as_stored(
    value,  # [HEADS, elements] fp32
    scales,  # [num_kv_heads] fp32, or None: 1
    head,  # [HEADS, 1], or a number
    live,  # of the shape of ``head``, whether it exists
    dtype: tl.constexpr,
):
    """Values as they are stored in ``dtype``; in bytes as ``attention.kv`` rounds them."""
    if dtype == tl.uint8:
        if scales is not None:
            value = tl.div_rn(value, tl.load(scales + head, live, other=1.0))
        return _e4m3_codes(value)
    else:
        return value.to(dtype)


@triton.jit
def as_read(loaded, dtype: tl.constexpr):
    """What was stored, bytes as numbers of ``dtype``, without their scale."""
    if loaded.dtype == tl.uint8:
        return loaded.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return loaded


@triton.jit
def _e4m3_codes(value):
    """Bytes of e4m3: to nearest even, at most 448; NaN is 0x7f.

    By integers: conversions differ between devices, and the interpreter's cuts digits off.
    """
    bits = value.to(tl.uint32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size > 448.0, 448.0, size)
    own = size.to(tl.int32, bitcast=True)
    # The exponent's bias is 7 in place of 127.
    normal = ((own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - 960
    # The distance of numbers around 1.5 * 2^14 is that of subnormal numbers, 2^-9.
    subnormal = (size + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    code = tl.where(size < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80).to(tl.int32)
    return tl.where(value == value, code, 0x7F).to(tl.uint8)

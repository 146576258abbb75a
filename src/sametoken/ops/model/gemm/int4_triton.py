"""Products with 4-bit weights on a GPU: widened in registers, sums fp32 by group.

A program adds the groups of features in order, one by one, whatever its tile: a row's bits depend
on no tile and no row count.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.gemm.int4 import Int4Weight
from sametoken.ops.model.gemm.triton import epilogue_of
from sametoken.ops.model.gemm.tuning import Epilogue
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

_FEATURES = 64


class Int4DeviceWeight(Int4Weight):
    """``Int4Weight`` on a GPU."""

    __slots__ = ()

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return product(x, self, epilogue_of(bias, out_dtype), bias)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return product(x, self, "silu_mul")


def product(
    x: Tensor, weight: Int4Weight, epilogue: Epilogue = "none", bias: Tensor | None = None
) -> Tensor:
    """One product; ``epilogue`` and ``bias`` as in ``gemm.triton.product``.

    Args:
        x: [T, K], contiguous.
        weight: [N, K].
        epilogue, bias: see above.
    """
    assert x.is_contiguous()
    matrix = weight.matrix
    assert all(one.is_contiguous() for one in (matrix.values, matrix.scale, matrix.zero))
    rows, in_features = x.shape
    assert in_features == weight.in_features
    gated = epilogue == "silu_mul"
    out_features = weight.out_features // 2 if gated else weight.out_features
    dtype = torch.float32 if epilogue == "logits" else x.dtype
    out = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if not rows:
        return out
    block_rows = next((size for size in (16, 32, 64) if rows <= size), 64)
    programs = triton.cdiv(rows, block_rows) * triton.cdiv(out_features, _FEATURES)
    _int4_kernel[(programs,)](
        weight.ordered(x),
        matrix.values,
        matrix.scale,
        matrix.zero,
        bias,
        out,
        rows,
        out_features,
        in_features,
        GATED=gated,
        WIDTH=matrix.width,
        BLOCK_ROWS=block_rows,
        BLOCK_FEATURES=_FEATURES,
        num_warps=4,
        num_stages=4,
        **pdl_options(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _int4_kernel(
    x,  # [rows, in_features]
    values,  # [out_features or twice as many, in_features / 2]: ``Int4Matrix``
    scales,  # [likewise, in_features / WIDTH]
    zeros,
    bias,  # [out_features], or None
    out,  # [rows, out_features], written
    rows,
    out_features,
    in_features,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    # Neighbouring programs share a weight tile, so that it is read from memory once.
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    row = (tl.program_id(0) % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = (tl.program_id(0) // row_tiles) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    is_row, is_feature = row < rows, feature < out_features
    x_at = x + row.to(tl.int64)[:, None] * in_features
    acc = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
    up = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
    for group in tl.range(0, in_features // WIDTH):
        half = group * WIDTH + tl.arange(0, WIDTH // 2)
        low = tl.load(x_at + half[None, :], is_row[:, None], other=0.0)
        high = tl.load(x_at + WIDTH // 2 + half[None, :], is_row[:, None], other=0.0)
        acc = _with_group(
            acc, low, high, values, scales, zeros, feature, is_feature, group, in_features, WIDTH
        )
        if GATED:
            up_feature = feature + out_features
            up = _with_group(
                up, low, high, values, scales, zeros, up_feature, is_feature, group, in_features,
                WIDTH,
            )  # fmt: skip
    dtype = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + feature, is_feature, other=0.0)[:, None]
    if GATED:
        gate, up = acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    at = out + row.to(tl.int64)[None, :] * out_features + feature[:, None]
    tl.store(at, acc.to(dtype), is_row[None, :] & is_feature[:, None])


@triton.jit
def _with_group(
    acc,
    low,
    high,
    values,
    scales,
    zeros,
    feature,
    is_feature,
    group,
    in_features,
    WIDTH: tl.constexpr,
):
    """``acc`` and one group's products with activations [rows, WIDTH / 2] of either half."""
    HALF: tl.constexpr = WIDTH // 2
    row = feature.to(tl.int64)
    at = values + (row * (in_features // 2) + group * HALF)[:, None] + tl.arange(0, HALF)[None, :]
    packed = tl.load(at, is_feature[:, None], other=0).to(tl.int32)
    of_group = row * (in_features // WIDTH) + group
    zero = tl.load(zeros + of_group, is_feature, other=0).to(tl.int32)[:, None]
    scale = tl.load(scales + of_group, is_feature, other=0.0).to(tl.float32)[:, None]
    # Exact: integers from -15 to 15.
    products = tl.dot(((packed & 15) - zero).to(low.dtype), low.T, input_precision="ieee")
    rest = ((packed >> 4) - zero).to(high.dtype)
    return acc + tl.dot(rest, high.T, products, input_precision="ieee") * scale

"""Sums of an expert's product in Triton, over tiles of weights and of its rows.

Sums over features run in order, as in ``gemm``, so a row's bits depend on no tile.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.gemm.triton import scaled, with_products


@triton.jit
def _sums(
    x_tiles,  # tensor descriptors, each None where tiles are loaded through pointers
    x_first,
    x_at,
    is_row,
    w_tiles,
    w_first,
    w_at,
    is_feature,
    w_scales,
    up_scales,
    x_scales,
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    W_STEP: tl.constexpr,
    X_STEP: tl.constexpr,
):
    """Sums over K in order, those of a group times its scales, if any: [features, rows] fp32.

    With GATED those of up too, over the same tiles of rows; else the second result is 0.
    """
    # Scales of the next group are on their way during the products of gate and up.
    AHEAD: tl.constexpr = GATED and x_scales is not None
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    up = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    if AHEAD:
        w_next = tl.load(w_scales, is_feature, other=0)
        up_next = tl.load(up_scales, is_feature, other=0)
        x_next = tl.load(x_scales, is_row, other=0)
    for k in range(0, K, DEPTH):
        column, group = k + depth, k // DEPTH
        w_scale, up_scale, x_scale = None, None, None
        if AHEAD:
            w_scale, up_scale, x_scale = w_next, up_next, x_next
            more = k + DEPTH < K
            w_next = tl.load(w_scales + (group + 1) * W_STEP, is_feature & more, other=0)
            up_next = tl.load(up_scales + (group + 1) * W_STEP, is_feature & more, other=0)
            x_next = tl.load(x_scales + (group + 1) * X_STEP, is_row & more, other=0)
        elif w_scales is not None:
            w_scale = tl.load(w_scales + group * W_STEP, is_feature, other=0)
            if GATED:
                up_scale = tl.load(up_scales + group * W_STEP, is_feature, other=0)
            if x_scales is not None:
                x_scale = tl.load(x_scales + group * X_STEP, is_row, other=0)
        x_tile = _tile(x_tiles, x_first, k, x_at, is_row, column, K)
        w_tile = _tile(w_tiles, w_first, k, w_at, is_feature, column, K)
        acc = with_products(acc, w_tile, x_tile, w_scale, x_scale)
        if GATED:
            up_tile = _tile(w_tiles, w_first + N, k, w_at + N * K, is_feature, column, K)
            up = with_products(up, up_tile, x_tile, up_scale, x_scale)
    return acc, up


@triton.jit
def _tile(tiles, first, k, at, is_row, column, K: tl.constexpr):
    """Load a tile [rows, depth]; by descriptor it has the rows that follow as well."""
    if tiles is not None:
        return tiles.load([first, k])
    return tl.load(at + column[None, :], is_row[:, None] & (column < K)[None, :], other=0.0)


@triton.jit
def scaled_sums(
    x,  # as for ``moe_triton._expert_kernel``
    x_tiles,
    x_first,
    x_row,
    is_row,
    weight,  # of one expert, as are its scales
    w_tiles,
    w_first,
    feature,
    is_feature,
    w_scales,
    x_scales,
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    W_GROUPS: tl.constexpr,
    X_GROUPS: tl.constexpr,
):
    """The sums of a product, and with GATED those of up, times all scales that there are."""
    GROUPED: tl.constexpr = W_GROUPS > 1 or X_GROUPS > 1
    W_STEP: tl.constexpr = 1 if W_GROUPS > 1 else 0
    X_STEP: tl.constexpr = 1 if X_GROUPS > 1 else 0
    x_at, w_at = x + x_row[:, None] * K, weight + feature[:, None] * K
    w_scale, up_scale, x_scale = None, None, None
    w_at_groups, up_at_groups, x_at_groups = None, None, None
    if w_scales is not None:
        if GROUPED:
            w_at_groups = w_scales + feature * W_GROUPS
            up_at_groups = w_at_groups + N * W_GROUPS
        else:
            w_scale = tl.load(w_scales + feature, is_feature, other=0)
            if GATED:
                up_scale = tl.load(w_scales + N + feature, is_feature, other=0)
    if x_scales is not None:
        if GROUPED:
            x_at_groups = x_scales + x_row * X_GROUPS
        else:
            x_scale = tl.load(x_scales + x_row, is_row, other=0)
    acc, up = _sums(
        x_tiles, x_first, x_at, is_row, w_tiles, w_first, w_at, is_feature,
        w_at_groups, up_at_groups, x_at_groups, GATED, N, K, DEPTH, W_STEP, X_STEP,
    )  # fmt: skip
    if w_scale is not None:
        acc = scaled(acc, w_scale, x_scale)
        if GATED:
            up = scaled(up, up_scale, x_scale)
    return acc, up

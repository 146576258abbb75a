"""The product of a mixture's experts in Triton: a program has a share of one expert's rows.

It loops over its tiles of rows. Sums over features run in order, as in ``gemm``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import triton
import triton.language as tl

from sametoken.ops.model.activation_triton import activated
from sametoken.ops.model.gemm.int4_panels import gate_and_up, int4_sums
from sametoken.ops.model.gemm.triton import finished, scaled, with_products
from sametoken.ops.pdl import gdc_launch_and_wait


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
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    up = tl.zeros([w_at.shape[0], x_at.shape[0]], tl.float32)
    for k in range(0, K, DEPTH):
        column, group = k + depth, k // DEPTH
        x_tile = _tile(x_tiles, x_first, k, x_at, is_row, column, K)
        w_tile = _tile(w_tiles, w_first, k, w_at, is_feature, column, K)
        acc = with_products(
            acc, w_tile, x_tile, w_scales, is_feature, x_scales, is_row, group, W_STEP, X_STEP
        )
        if GATED:
            up_tile = _tile(w_tiles, w_first + N, k, w_at + N * K, is_feature, column, K)
            up = with_products(
                up, up_tile, x_tile, up_scales, is_feature, x_scales, is_row, group, W_STEP, X_STEP
            )
    return acc, up


@triton.jit
def _tile(tiles, first, k, at, is_row, column, K: tl.constexpr):
    """Load a tile [rows, depth]; by descriptor it has the rows that follow as well."""
    if tiles is not None:
        return tiles.load([first, k])
    return tl.load(at + column[None, :], is_row[:, None] & (column < K)[None, :], other=0.0)


@triton.jit
def _scaled_sums(
    x,  # as for expert_kernel
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


@triton.jit
def _with_biases(acc, up, biases, expert, feature, N: tl.constexpr, GATED: tl.constexpr):
    """Add an expert's biases, and with GATED those of up.

    Sums are finished before: of those that one tile holds whole, the compiler would let the matrix
    unit begin with the bias.
    """
    own = biases + expert * (2 * N if GATED else N) + feature
    acc = finished(acc) + tl.load(own, feature < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = finished(up) + tl.load(own + N, feature < N, other=0.0).to(tl.float32)[:, None]
    return acc, up


@triton.jit(do_not_specialize=["num_pairs"])
def expert_kernel(
    x,  # [rows, K]; see GATHER
    x_tiles,  # tensor descriptors, each None where tiles are loaded through pointers
    weight,  # [E, N, K]; [E, 2 * N, K] before a gate; in 4 bits ``Int4Panels.words``
    w_tiles,
    w_scales,  # [E, N or 2 * N, W_GROUPS], or None; in 4 bits ``Int4Panels.scales``
    w_factors,  # of 4 bits, ``Int4Panels.factors``, or None
    w_zeros,  # of 4 bits, as scales, or None
    x_scales,  # [rows, X_GROUPS], or None
    biases,  # [E, N or 2 * N], or None
    experts,  # ``RowGroups``, as are the next three
    counts,
    starts,
    members,
    out,  # [num_pairs, N], written; see GATHER
    num_pairs,
    one,  # as for ``int4_sums``
    N: tl.constexpr,
    K: tl.constexpr,
    PLACED: tl.constexpr,  # matrices lie in the order of ``experts``; else by id
    GATHER: tl.constexpr,  # pairs of each row of x; out's rows lie by expert. 0: the reverse
    ACTIVATION: tl.constexpr,  # as for ``activated``; "none"; "put_off": out is [num_pairs, 2 * N]
    W_GROUPS: tl.constexpr,  # in 4 bits, rows of the scales of an expert
    X_GROUPS: tl.constexpr,
    WORDS: tl.constexpr,  # of a row in 4 bits, else 0
    WIDTH: tl.constexpr,  # features of a group in 4 bits
    E2M1: tl.constexpr,  # as in ``Int4Panels``, as is FUSED
    FUSED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ALPHA: tl.constexpr,  # of "clamped_swiglu", as is LIMIT
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of an expert by its weight, its bias and what follows; see ``moe_forward``."""
    GATED: tl.constexpr = ACTIVATION != "relu_squared" and ACTIVATION != "none"
    gdc_launch_and_wait(PDL)
    group = tl.program_id(2)
    expert, count = tl.load(experts + group).to(tl.int64), tl.load(counts + group)
    start = tl.load(starts + group)
    first_feature = tl.program_id(0) * BLOCK_FEATURES
    feature = first_feature + tl.arange(0, BLOCK_FEATURES)
    is_feature, step = feature < N, tl.num_programs(1) * BLOCK_ROWS
    rows = (group if PLACED else expert) * (2 * N if GATED else N)
    weight += rows * (WORDS if WORDS else K)
    if w_scales is not None:
        w_scales += rows * W_GROUPS
    if w_factors is not None:
        w_factors += rows
    if w_zeros is not None:
        w_zeros += rows * W_GROUPS
    members += expert * num_pairs
    for first in range(tl.program_id(1) * BLOCK_ROWS, count, step):
        member = first + tl.arange(0, BLOCK_ROWS)
        is_pair = member < count
        pair = tl.load(members + member, is_pair, other=0).to(tl.int64)
        place = (start + member).to(tl.int64)
        x_row, out_row = (pair // GATHER, place) if GATHER else (place, pair)
        if WORDS:
            acc = int4_sums(
                x + x_row[:, None] * K, is_pair, weight, None, w_scales, w_factors, w_zeros,
                first_feature, N, K, WORDS, one,
                GATED, WIDTH, E2M1, FUSED, 1, K % 128 == 0,
                BLOCK_FEATURES * 2 if GATED else BLOCK_FEATURES,
            )  # fmt: skip
            up = acc
            if GATED:
                acc, up = gate_and_up(acc)
        else:
            acc, up = _scaled_sums(
                x, x_tiles, start + first, x_row, is_pair,
                weight, w_tiles, rows.to(tl.int32) + first_feature, feature, is_feature,
                w_scales, x_scales, GATED, N, K, BLOCK_DEPTH, W_GROUPS, X_GROUPS,
            )  # fmt: skip
        if biases is not None:
            acc, up = _with_biases(acc, up, biases, expert, feature, N, GATED)
        dtype = out.dtype.element_ty
        if ACTIVATION != "none" and ACTIVATION != "put_off":
            acc = activated(acc, up, dtype, ACTIVATION, ALPHA, LIMIT)
        stored = is_feature[:, None] & is_pair[None, :]
        at = out + out_row[None, :] * (2 * N if ACTIVATION == "put_off" else N) + feature[:, None]
        tl.store(at, acc.to(dtype), stored)
        if ACTIVATION == "put_off":
            tl.store(at + N, up.to(dtype), stored)

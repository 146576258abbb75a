"""Gradients of a mixture of experts in Triton, with the same bits every time.

Rows are grouped by expert as in the forward pass. Inner features are computed again. No program
adds to what another one writes: a row's gradients are added by rank, and an expert's weights have
one program for each tile, which adds up over the expert's rows in order.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.activation_triton import gelu_of
from sametoken.ops.model.moe_rows_triton import RowGroups, combine
from sametoken.ops.triton_versions import FUSED

#: What experts have between their two products; "relu_squared" has no gate.
Activation = Literal["silu_mul", "gelu_mul", "relu_squared"]

#: Programs that share the rows of an expert and a tile of features.
_SHARES = 8
_COLUMNS = 1024


def expert_gradients(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    of: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``moe_forward``, of products summed in fp32 and rounded once.

    Args:
        x: [T, H], contiguous, as all arguments but ``of``.
        chosen: [T, top_k] int64.
        weights: [T, top_k] fp32.
        gate_up: [E, 2 * I, H], gate first; [E, I, H] with "relu_squared".
        down: [E, H, I].
        activation: of the experts.
        of: [T, H], the result's gradient.

    Returns:
        Of x and ``weights``, and of the two matrices, or None where these require none.
    """
    groups, of = RowGroups.of(chosen, len(down)), of.to(x.dtype).contiguous()
    pairs, top_k = chosen.numel(), chosen.shape[1]
    inner = _rows(x, gate_up.mT, groups, top_k)
    # The gradient of an expert's inner features, if its weight were 1.
    given = _rows(of, down, groups, top_k)
    by_inner, scaled = torch.empty_like(inner), torch.empty_like(given)
    by_weights = torch.empty_like(weights)
    _inner_kernel[(pairs,)](
        inner,
        given,
        weights,
        by_inner,
        scaled,
        by_weights,
        WIDTH=given.shape[1],
        ACTIVATION=activation,
        BLOCK=min(next_power_of_2(given.shape[1]), _COLUMNS),
        num_warps=4,
        **FUSED,
    )
    by_x = torch.empty_like(x)
    combine(_rows(by_inner, gate_up, groups, 1), torch.ones_like(weights), by_x)
    return (
        by_x,
        by_weights,
        _weights(by_inner, x, groups, 1, top_k) if gate_up.requires_grad else None,
        _weights(of, scaled, groups, top_k, 1) if down.requires_grad else None,
    )


def _tile(size: int, dtype: torch.dtype) -> int:
    """Elements of a tile; without tensor cores, such as fit in registers."""
    return min(max(next_power_of_2(size), 16), 32 if dtype == torch.float32 else 128)


def _rows(x: Tensor, weight: Tensor, groups: RowGroups, pairs_per_row: int) -> Tensor:
    """Each pair's row times its expert's matrix: [rows, K] and [E, K, N] to [pairs, N]."""
    (num_experts, pairs), (depth, features) = groups.members.shape, weight.shape[1:]
    out = x.new_empty(pairs, features)
    block_rows = min(_tile(int(groups.mean_rows), x.dtype), 64)
    block_features = _tile(features, x.dtype)
    shares = min(_SHARES, cdiv(pairs, block_rows))
    _rows_kernel[(num_experts, cdiv(features, block_features), shares)](
        x,
        weight,
        groups.experts,
        groups.counts,
        groups.members,
        out,
        pairs,
        N=features,
        K=depth,
        DEPTH_STRIDE=weight.stride(1),
        FEATURE_STRIDE=weight.stride(2),
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_ROWS=block_rows,
        BLOCK_FEATURES=block_features,
        BLOCK_DEPTH=min(_tile(depth, x.dtype), 64),
        num_warps=4,
        num_stages=3,
        **FUSED,
    )
    return out


def _weights(
    left: Tensor, right: Tensor, groups: RowGroups, left_pairs: int, right_pairs: int
) -> Tensor:
    """The sum of ``left.T @ right`` over each expert's pairs: [rows, M], [rows, N] to [E, M, N].

    ``left_pairs`` and ``right_pairs`` are the pairs of a row of either.
    """
    (num_experts, pairs), dtype = groups.members.shape, left.dtype
    m, n = left.shape[1], right.shape[1]
    out = left.new_empty(num_experts, m, n)
    tiles = _tile(m, dtype), _tile(n, dtype)
    _weights_kernel[(num_experts, cdiv(m, tiles[0]), cdiv(n, tiles[1]))](
        left,
        right,
        groups.experts,
        groups.counts,
        groups.members,
        out,
        pairs,
        M=m,
        N=n,
        LEFT_PAIRS=left_pairs,
        RIGHT_PAIRS=right_pairs,
        BLOCK_M=tiles[0],
        BLOCK_N=tiles[1],
        BLOCK_PAIRS=min(_tile(pairs, dtype), 64),
        num_warps=8,
        num_stages=3,
        **FUSED,
    )
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def _rows_kernel(
    x,  # [rows, K]; pair p reads row p // PAIRS_PER_ROW
    weight,  # [E, K, N], of any layout within a matrix
    experts,  # ``RowGroups``, as are the next two
    counts,
    members,
    out,  # [num_pairs, N], written
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH_STRIDE: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    group = tl.program_id(0)
    expert, count = tl.load(experts + group).to(tl.int64), tl.load(counts + group)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    is_feature = feature < N
    members += expert * num_pairs
    w_at = weight + expert * K * N + feature[None, :] * FEATURE_STRIDE
    step = tl.num_programs(2) * BLOCK_ROWS
    for first in range(tl.program_id(2) * BLOCK_ROWS, count, step):
        member = first + tl.arange(0, BLOCK_ROWS)
        is_pair = member < count
        pair = tl.load(members + member, is_pair, other=0).to(tl.int64)
        x_at = x + (pair // PAIRS_PER_ROW)[:, None] * K
        acc = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], tl.float32)
        for start in range(0, K, BLOCK_DEPTH):
            depth = start + tl.arange(0, BLOCK_DEPTH)
            present = depth < K
            x_tile = tl.load(x_at + depth[None, :], is_pair[:, None] & present[None, :], other=0.0)
            w_tile = tl.load(
                w_at + depth[:, None] * DEPTH_STRIDE,
                present[:, None] & is_feature[None, :],
                other=0.0,
            )
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        at = out + pair[:, None] * N + feature[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), is_pair[:, None] & is_feature[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _weights_kernel(
    left,  # [rows, M]; pair p reads row p // LEFT_PAIRS
    right,  # [rows, N]; pair p reads row p // RIGHT_PAIRS
    experts,  # ``RowGroups``, as are the next two
    counts,
    members,
    out,  # [E, M, N], written
    num_pairs,
    M: tl.constexpr,
    N: tl.constexpr,
    LEFT_PAIRS: tl.constexpr,
    RIGHT_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    group = tl.program_id(0)
    expert, count = tl.load(experts + group).to(tl.int64), tl.load(counts + group)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    members += expert * num_pairs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_PAIRS):
        member = first + tl.arange(0, BLOCK_PAIRS)
        is_pair = (member < count)[:, None]
        pair = tl.load(members + member, member < count, other=0).to(tl.int64)[:, None]
        left_at = left + pair // LEFT_PAIRS * M + m[None, :]
        right_at = right + pair // RIGHT_PAIRS * N + n[None, :]
        left_tile = tl.load(left_at, is_pair & (m < M)[None, :], other=0.0)
        right_tile = tl.load(right_at, is_pair & (n < N)[None, :], other=0.0)
        acc = tl.dot(left_tile.T, right_tile, acc, input_precision="ieee")
    at = out + (expert * M + m[:, None]) * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _slope(gate, ACTIVATION: tl.constexpr):
    """A gate's activation in fp32, and its derivative."""
    if ACTIVATION == "relu_squared":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "gelu_mul":
        # gelu is gate * sigmoid(z) with z odd and cubic in the gate.
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        share = 1.0 / (1.0 + tl.exp(-z))
        by_gate = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)
        return gelu_of(gate), share * (1.0 + gate * (1.0 - share) * by_gate)
    else:
        share = 1.0 / (1.0 + tl.exp(-gate))
        return gate * share, share * (1.0 + gate * (1.0 - share))


@triton.jit
def _inner_kernel(
    inner,  # [pairs, 2 * WIDTH] = [gate | up], or [pairs, WIDTH] without gates, as by_inner
    given,  # [pairs, WIDTH], the gradient of the activation, of a weight of 1
    weights,  # [pairs]
    by_inner,  # written
    scaled,  # [pairs, WIDTH], written: the activation times the weight
    by_weights,  # [pairs], written
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != "relu_squared"
    ROW: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    pair = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + pair)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        at, own = pair * ROW + column, pair * WIDTH + column
        value, slope = _slope(tl.load(inner + at, inside, other=0.0).to(tl.float32), ACTIVATION)
        of = tl.load(given + own, inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(inner + at + WIDTH, inside, other=0.0).to(tl.float32)
            by_up = (of * weight * value).to(by_inner.dtype.element_ty)
            tl.store(by_inner + at + WIDTH, by_up, inside)
            value *= up
            slope *= up
        total += of * value
        tl.store(by_inner + at, (of * weight * slope).to(by_inner.dtype.element_ty), inside)
        tl.store(scaled + own, (weight * value).to(scaled.dtype.element_ty), inside)
    tl.store(by_weights + pair, tl.sum(total, axis=0))

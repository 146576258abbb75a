"""The weighted sum of a row's experts in Triton; no shape depends on the routing.

Rows are grouped by expert on the device; a product then loops over the rows of one expert, tile
by tile. Sums over features run in order, as in ``gemm``, so a row's bits depend neither on the
tiles nor on the other rows of the same expert.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.model.activation_triton import clamped_swiglu_of, gelu_of
from sametoken.ops.model.gemm.fp8 import GROUP
from sametoken.ops.model.gemm.fp8_triton import rounded
from sametoken.ops.model.gemm.triton import groups_of, scaled, with_products
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.weight import ClampedExperts, ExpertForm, Rounding

_GROUP_BLOCK = 1024
_COLUMNS = 1024

#: Rows per tile: large above _MANY_ROWS rows of the pass, small otherwise.
_MANY_ROWS, _LARGE_TILE, _SMALL_TILE = 256, 64, 16


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of a layer on the GPU.

    Attributes:
        gate_up: [E, 2 * I, H], gate first; [E, I, H], up alone, for experts without gates. float8
            with scales.
        down: [E, H, I].
        gate_up_scales, down_scales: fp32 scales of float8 matrices: [E, rows], or
            [E, rows, groups] by row and 128 features; None: not float8.
        gate_up_rounding, down_rounding: of activations before a float8 product; None: none.
        form: what they have in place of silu's gate without biases; None: nothing.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    gate_up_rounding: Rounding | None = None
    down_rounding: Rounding | None = None
    form: ExpertForm | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, scales and biases."""
        parts = (self.gate_up, self.down, self.gate_up_scales, self.down_scales, self.form)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See ``moe_forward``."""
        return moe_forward(x, self, chosen, weights, out_dtype)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """All experts' matrices of one product, as in ``StackedExperts``, and their biases."""

    weight: Tensor
    scales: Tensor | None
    rounding: Rounding | None
    biases: Tensor | None


@dataclass(frozen=True, slots=True)
class _Activation:
    """What follows a product; ``alpha`` and ``limit`` are those of "clamped_swiglu"."""

    name: str
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class _Groups:
    """(row, choice) pairs grouped by expert: counts [E], members [E, pairs], rows per tile."""

    counts: Tensor
    members: Tensor
    block_rows: int


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    chosen,  # [num_pairs]
    counts,  # [E], written
    members,  # [E, num_pairs], written
    num_pairs,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Collect the (row, choice) pairs of one expert, in order."""
    gdc_launch_and_wait(PDL)
    expert = tl.program_id(0)
    members += expert.to(tl.int64) * num_pairs
    count = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(chosen + pair, pair < num_pairs, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(members + place, pair, mine)
        count += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + expert, count)


@triton.jit
def _sums(
    x_at,
    is_row,
    w_at,
    up_at,
    is_feature,
    w_scales,
    up_scales,
    x_scales,
    GATED: tl.constexpr,
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
        column, group = (k + depth)[None, :], k // DEPTH
        x_tile = tl.load(x_at + column, is_row[:, None] & (column < K), other=0.0)
        is_weight = is_feature[:, None] & (column < K)
        w_tile = tl.load(w_at + column, is_weight, other=0.0)
        acc = with_products(
            acc, w_tile, x_tile, w_scales, is_feature, x_scales, is_row, group, W_STEP, X_STEP
        )
        if GATED:
            up_tile = tl.load(up_at + column, is_weight, other=0.0)
            up = with_products(
                up, up_tile, x_tile, up_scales, is_feature, x_scales, is_row, group, W_STEP, X_STEP
            )
    return acc, up


@triton.jit
def _with_biases(acc, up, biases, expert, feature, N: tl.constexpr, GATED: tl.constexpr):
    """Add an expert's biases, and with GATED those of up."""
    own = biases + expert * (2 * N if GATED else N) + feature
    acc += tl.load(own, feature < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up += tl.load(own + N, feature < N, other=0.0).to(tl.float32)[:, None]
    return acc, up


@triton.jit
def _activated(
    sums,
    up,
    dtype: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The activation in fp32, of sums rounded to ``dtype``."""
    rounded = sums.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        return clamped_swiglu_of(rounded, up.to(dtype).to(tl.float32), ALPHA, LIMIT)
    elif ACTIVATION == "gelu_mul":
        return gelu_of(rounded) * up.to(dtype).to(tl.float32)
    elif ACTIVATION == "silu_mul":
        return rounded / (1.0 + tl.exp(-rounded)) * up.to(dtype).to(tl.float32)
    else:
        return tl.where(rounded < 0.0, 0.0, rounded * rounded)


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_kernel(
    x,  # [rows, K]; pair p reads row p // PAIRS_PER_ROW
    weight,  # [E, N, K]; [E, 2 * N, K] before a gate
    w_scales,  # [E, N or 2 * N, W_GROUPS], or None
    x_scales,  # [rows, X_GROUPS], or None
    biases,  # [E, N or 2 * N], or None
    counts,  # [E]
    members,  # [E, num_pairs]
    out,  # [num_pairs, N], written
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu_mul", "gelu_mul", "clamped_swiglu", "relu_squared", "none"
    W_GROUPS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ALPHA: tl.constexpr,  # of "clamped_swiglu", as is LIMIT
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != "relu_squared" and ACTIVATION != "none"
    GROUPED: tl.constexpr = W_GROUPS > 1 or X_GROUPS > 1
    W_STEP: tl.constexpr = 1 if W_GROUPS > 1 else 0
    X_STEP: tl.constexpr = 1 if X_GROUPS > 1 else 0
    gdc_launch_and_wait(PDL)
    expert = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    is_feature = feature < N
    w_at = weight + expert * (2 * N * K if GATED else N * K) + feature[:, None] * K
    own_scales, up_scales, w_at_groups, up_at_groups = None, None, None, None
    if w_scales is not None:
        own_scales = w_scales + expert * (2 * N * W_GROUPS if GATED else N * W_GROUPS)
        up_scales = own_scales + N * W_GROUPS
        if GROUPED:
            w_at_groups = own_scales + feature * W_GROUPS
            up_at_groups = up_scales + feature * W_GROUPS
    count = tl.load(counts + expert)
    members += expert * num_pairs
    for first in range(0, count, BLOCK_ROWS):
        member = first + tl.arange(0, BLOCK_ROWS)
        is_pair = member < count
        pair = tl.load(members + member, is_pair, other=0).to(tl.int64)
        x_row = pair // PAIRS_PER_ROW
        x_at = x + x_row[:, None] * K
        x_at_groups = None
        if GROUPED and x_scales is not None:
            x_at_groups = x_scales + x_row * X_GROUPS
        acc, up = _sums(
            x_at, is_pair, w_at, w_at + N * K, is_feature, w_at_groups, up_at_groups, x_at_groups,
            GATED, K, BLOCK_DEPTH, W_STEP, X_STEP,
        )  # fmt: skip
        if not GROUPED:
            acc = scaled(acc, own_scales, feature, is_feature, x_scales, x_row, is_pair)
            if GATED:
                up = scaled(up, up_scales, feature, is_feature, x_scales, x_row, is_pair)
        if biases is not None:
            acc, up = _with_biases(acc, up, biases, expert, feature, N, GATED)
        dtype = out.dtype.element_ty
        if ACTIVATION != "none":
            acc = _activated(acc, up, dtype, ACTIVATION, ALPHA, LIMIT)
        at = out + pair[None, :] * N + feature[:, None]
        tl.store(at, acc.to(dtype), is_feature[:, None] & is_pair[None, :])


@triton.jit
def _combine_kernel(
    outputs,  # [T, TOP_K, WIDTH]
    weights,  # [T, TOP_K]
    out,  # [T, WIDTH], written
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        at = outputs + (row * TOP_K + rank) * WIDTH + column
        value = tl.load(at, column < WIDTH, other=0.0).to(tl.float32)
        total += tl.load(weights + row * TOP_K + rank) * value
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), column < WIDTH)


def moe_forward(
    x: Tensor,
    experts: StackedExperts,
    chosen: Tensor,
    weights: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Weighted sum of every row's experts, added by rank in fp32: [T, H] -> [T, H].

    Expert outputs are rounded to the result's dtype first; gate and up to x's.

    Args:
        x: [T, H].
        experts: E experts.
        chosen: [T, top_k] int64, below E.
        weights: [T, top_k] fp32.
        dtype: of the result; default x's.
    """
    num_rows, top_k = chosen.shape
    num_experts, hidden, inner = experts.down.shape
    for tensor in (x, experts.gate_up, experts.down, chosen, weights):
        assert tensor.is_contiguous()
    assert x.shape == (num_rows, hidden)
    out = torch.empty_like(x, dtype=dtype)
    if not num_rows:
        return out
    pairs = num_rows * top_k
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    members = torch.empty(num_experts, pairs, dtype=torch.int32, device=x.device)
    _group_kernel[(num_experts,)](
        chosen,
        counts,
        members,
        pairs,
        BLOCK=min(triton.next_power_of_2(pairs), _GROUP_BLOCK),
        num_warps=4,
        **pdl_options(x),
    )
    groups = _Groups(counts, members, _LARGE_TILE if num_rows > _MANY_ROWS else _SMALL_TILE)
    features = x.new_empty(pairs, inner)
    first, second = _both_products(experts)
    _product(x, first, groups, features, top_k, _activation_of(experts))
    outputs = out.new_empty(pairs, hidden)
    _product(features, second, groups, outputs, 1, _Activation("none"))
    _combine_kernel[(num_rows, triton.cdiv(hidden, _COLUMNS))](
        outputs,
        weights,
        out,
        TOP_K=top_k,
        WIDTH=hidden,
        BLOCK=min(triton.next_power_of_2(hidden), _COLUMNS),
        num_warps=4,
        **pdl_options(x),
    )
    return out


def _both_products(experts: StackedExperts) -> tuple[_Matrices, _Matrices]:
    form = experts.form
    biases = (form.gate_up, form.down) if isinstance(form, ClampedExperts) else (None, None)
    return (
        _Matrices(experts.gate_up, experts.gate_up_scales, experts.gate_up_rounding, biases[0]),
        _Matrices(experts.down, experts.down_scales, experts.down_rounding, biases[1]),
    )


def _activation_of(experts: StackedExperts) -> _Activation:
    form = experts.form
    if isinstance(form, ClampedExperts):
        return _Activation("clamped_swiglu", form.alpha, form.limit)
    if form is not None:
        return _Activation("gelu_mul")
    is_gated = experts.gate_up.shape[1] != experts.down.shape[2]
    return _Activation("silu_mul" if is_gated else "relu_squared")


def _product(
    x: Tensor,
    stack: _Matrices,
    groups: _Groups,
    out: Tensor,
    pairs_per_row: int,
    activation: _Activation,
) -> None:
    """Multiply each pair's row by its expert's weight into ``out`` [pairs, N]."""
    num_experts, pairs = groups.members.shape
    out_features, in_features = out.shape[1], stack.weight.shape[2]
    features = min(max(triton.next_power_of_2(out_features), 16), 64)
    depth = min(max(triton.next_power_of_2(in_features), 16), 64)
    x_scales = None
    if stack.scales is not None:
        depth = GROUP
    if stack.rounding is not None:
        x, x_scales = rounded(x, stack.rounding)
    _expert_kernel[(num_experts, triton.cdiv(out_features, features))](
        x,
        stack.weight,
        stack.scales,
        x_scales,
        stack.biases,
        groups.counts,
        groups.members,
        out,
        pairs,
        N=out_features,
        K=in_features,
        PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation.name,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        W_GROUPS=1 if stack.scales is None else groups_of(stack.scales[0]),
        X_GROUPS=groups_of(x_scales),
        BLOCK_ROWS=groups.block_rows,
        BLOCK_FEATURES=features,
        BLOCK_DEPTH=depth,
        num_warps=4,
        num_stages=4,
        **pdl_options(x),
    )

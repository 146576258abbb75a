"""MoE routing and weighted expert sum in Triton; no shape depends on the routing.

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

from sametoken.ops.backend import Routing
from sametoken.ops.model import moe as reference
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

TINY = tl.constexpr(reference.TINY)
_GROUP_BLOCK = 1024
_COLUMNS = 1024

#: Rows per tile: large above _MANY_ROWS rows of the pass, small otherwise.
_MANY_ROWS, _LARGE_TILE, _SMALL_TILE = 256, 64, 16


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of a layer on the GPU.

    Attributes:
        gate_up: [E, 2 * I, H], gate first; [E, I, H], up alone, for experts without gates.
        down: [E, H, I].
    """

    gate_up: Tensor
    down: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See ``moe_forward``."""
        return moe_forward(x, self, chosen, weights, out_dtype)


@dataclass(frozen=True, slots=True)
class _Groups:
    """(row, choice) pairs grouped by expert: counts [E], members [E, pairs], rows per tile."""

    counts: Tensor
    members: Tensor
    block_rows: int


@triton.jit
def _best(scores, ids, END: tl.constexpr):
    """The largest score and the lowest id that has it, or the last id in a row of NaN."""
    best = tl.max(scores, axis=0)
    # NaN equals nothing; its row is dropped later, but needs a valid id.
    return best, tl.minimum(tl.min(tl.where(scores == best, ids, END), axis=0), END - 1)


@triton.jit
def _in_best_groups(
    ranked,
    expert,
    E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Whether an expert is in one of the row's best groups."""
    group = expert // (E // NUM_GROUPS)
    ids = tl.arange(0, GROUP_BLOCK)
    scores = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    for index in tl.static_range(NUM_GROUPS):
        members = tl.where(group == index, ranked, float("-inf"))
        score, first = _best(members, expert, E)
        for _ in tl.static_range(1, GROUP_BEST):
            members = tl.where(expert == first, float("-inf"), members)
            following, first = _best(members, expert, E)
            score += following
        scores = tl.where(ids == index, score, scores)
    inside = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, winner = _best(scores, ids, NUM_GROUPS)
        inside |= group == winner
        scores = tl.where(ids == winner, float("-inf"), scores)
    return inside


@triton.jit
def _moe_gate_kernel(
    logits,  # [T, E]
    bias,  # [E], None without
    chosen,  # [T, TOP_K], written
    weights,  # [T, TOP_K], written
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    inside = expert < E
    logit = tl.load(logits + row * E + expert, inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        power = tl.where(inside, tl.exp(logit - tl.max(logit, axis=0)), 0.0)
        scores = power / tl.sum(power, axis=0)
    ranked = scores
    if bias is not None:
        ranked += tl.load(bias + expert, inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    if NUM_GROUPS > 1:
        eligible = _in_best_groups(
            ranked, expert, E, NUM_GROUPS, TOP_GROUPS, GROUP_BEST, GROUP_BLOCK
        )
        ranked = tl.where(eligible, ranked, float("-inf"))
    place = tl.arange(0, K_BLOCK)
    ids = tl.zeros((K_BLOCK,), tl.int64)
    found = tl.zeros((K_BLOCK,), tl.float32)
    total = TINY
    for rank in tl.static_range(TOP_K):
        _, first = _best(ranked, expert, E)
        score = tl.sum(tl.where(expert == first, scores, 0.0), axis=0)
        ids = tl.where(place == rank, first.to(tl.int64), ids)
        found = tl.where(place == rank, score, found)
        total += score
        ranked = tl.where(expert == first, float("-inf"), ranked)
    if NORMALISE:
        found = found / total
    at = row * TOP_K + place
    tl.store(chosen + at, ids, place < TOP_K)
    rounded = (found * scale).to(logits.dtype.element_ty).to(tl.float32)
    tl.store(weights + at, rounded, place < TOP_K)


def moe_gate(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``Kernels.moe_gate``."""
    assert logits.is_contiguous()
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        _moe_gate_kernel[(num_rows,)](
            logits,
            bias,
            chosen,
            weights,
            routing.scale,
            E=num_experts,
            TOP_K=routing.top_k,
            NORMALISE=routing.normalise,
            SIGMOID=routing.scoring == "sigmoid",
            NUM_GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best,
            E_BLOCK=triton.next_power_of_2(num_experts),
            K_BLOCK=triton.next_power_of_2(routing.top_k),
            GROUP_BLOCK=triton.next_power_of_2(routing.num_groups),
            num_warps=1,
            **pdl_options(logits),
        )
    return chosen, weights


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


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_kernel(
    x,  # [rows, K]; pair p reads row p // PAIRS_PER_ROW
    weight,  # [E, N, K]; [E, 2 * N, K] if the activation is "silu_mul"
    counts,  # [E]
    members,  # [E, num_pairs]
    out,  # [num_pairs, N], written
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu_mul", "relu_squared" or "none"
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION == "silu_mul"
    gdc_launch_and_wait(PDL)
    expert = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    depth = tl.arange(0, BLOCK_DEPTH)
    is_feature = feature < N
    w_at = weight + expert * (2 * N * K if GATED else N * K) + feature[:, None] * K
    count = tl.load(counts + expert)
    members += expert * num_pairs
    for first in range(0, count, BLOCK_ROWS):
        member = first + tl.arange(0, BLOCK_ROWS)
        is_pair = member < count
        pair = tl.load(members + member, is_pair, other=0).to(tl.int64)
        x_at = x + (pair // PAIRS_PER_ROW)[:, None] * K
        acc = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
        up = tl.zeros([BLOCK_FEATURES, BLOCK_ROWS], tl.float32)
        for k in range(0, K, BLOCK_DEPTH):
            column = (k + depth)[None, :]
            x_tile = tl.load(x_at + column, is_pair[:, None] & (column < K), other=0)
            is_weight = is_feature[:, None] & (column < K)
            w_tile = tl.load(w_at + column, is_weight, other=0)
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
            if GATED:
                up_tile = tl.load(w_at + N * K + column, is_weight, other=0)
                up = tl.dot(up_tile, x_tile.T, up, input_precision="ieee")
        dtype = out.dtype.element_ty
        if GATED:
            gate, up = acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            acc = gate / (1.0 + tl.exp(-gate)) * up
        if ACTIVATION == "relu_squared":
            rounded = acc.to(dtype).to(tl.float32)
            acc = tl.where(rounded < 0.0, 0.0, rounded * rounded)
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

    Expert outputs are rounded to the result's dtype first; gate and up to x's. Experts without
    gates apply relu(up)^2.

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
    activation = "relu_squared" if experts.gate_up.shape[1] == inner else "silu_mul"
    _product(x, experts.gate_up, groups, features, top_k, activation)
    outputs = out.new_empty(pairs, hidden)
    _product(features, experts.down, groups, outputs, 1, "none")
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


def _product(
    x: Tensor,
    weight: Tensor,
    groups: _Groups,
    out: Tensor,
    pairs_per_row: int,
    activation: str,
) -> None:
    """Multiply each pair's row by its expert's weight into ``out`` [pairs, N]."""
    num_experts, pairs = groups.members.shape
    out_features = out.shape[1]
    features = min(max(triton.next_power_of_2(out_features), 16), 64)
    depth = min(max(triton.next_power_of_2(weight.shape[2]), 16), 64)
    _expert_kernel[(num_experts, triton.cdiv(out_features, features))](
        x,
        weight,
        groups.counts,
        groups.members,
        out,
        pairs,
        N=out_features,
        K=weight.shape[2],
        PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation,
        BLOCK_ROWS=groups.block_rows,
        BLOCK_FEATURES=features,
        BLOCK_DEPTH=depth,
        num_warps=4,
        num_stages=4,
        **pdl_options(x),
    )

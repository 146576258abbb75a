"""MoE routing in Triton; no shape depends on the routing."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import Routing
from sametoken.ops.launch_sizes import next_power_of_2
from sametoken.ops.model import moe as reference
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options

TINY = tl.constexpr(reference.TINY)


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


def moe_gate(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``Kernels.moe_gate``."""
    assert logits.is_contiguous()
    num_rows, num_experts = logits.shape
    chosen = out
    if chosen is None:
        chosen = torch.empty(num_rows, routing.top_k, dtype=torch.int64, device=logits.device)
    assert chosen.is_contiguous()
    assert chosen.shape == (num_rows, routing.top_k)
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
            E_BLOCK=next_power_of_2(num_experts),
            K_BLOCK=next_power_of_2(routing.top_k),
            GROUP_BLOCK=next_power_of_2(routing.num_groups),
            num_warps=1,
            **pdl_options(logits),
        )
    return chosen, weights

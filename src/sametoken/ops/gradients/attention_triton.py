"""Gradients of causal attention over packed sequences in Triton, with the same bits every time.

No program adds to what another one writes: one kernel has a program for each tile of queries, a
second one for each tile of keys, which adds up over the query heads that share them.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.backend import AttentionShape
from sametoken.ops.launch_sizes import cdiv, next_power_of_2
from sametoken.ops.model.attention.tuning import LOG2_E
from sametoken.ops.triton_versions import FUSED

#: A score below all others that stays a number in differences.
_UNSEEN = tl.constexpr(-1e30)


def attention_gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    of: Tensor,
    shape: AttentionShape,
    starts: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention within each sequence, summed in fp32 and rounded once.

    Args:
        qkv: q, k and v, [T, heads, head_dim] each, of one dtype.
        out: [T, q_size], the attention's result.
        of: [T, q_size], its gradient.
        shape: of the layer.
        starts: [S + 1] int64: sequence i has rows ``starts[i] .. starts[i + 1] - 1``.
        longest: the most rows of a sequence.

    Returns:
        Of q, k and v, in their dtype.
    """
    q, k, v = (tensor.contiguous() for tensor in qkv)
    out, of = out.contiguous(), of.to(q.dtype).contiguous()
    by_q, by_k, by_v = (torch.empty_like(tensor) for tensor in (q, k, v))
    # The logarithm of each row's total weight, and the product of its output and gradient.
    total, dots = q.new_empty(2, *q.shape[:2], dtype=torch.float32).unbind(0)
    num_sequences, scale = starts.shape[0] - 1, shape.scale
    sizes = {
        "HEADS": shape.num_heads,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "D": shape.head_dim,
        "WINDOW": shape.sliding_window or 0,
        **_tiles(shape.head_dim, q.dtype),
        **FUSED,
    }
    tiles = cdiv(longest, sizes["OWN"])
    _queries_kernel[(num_sequences * tiles, shape.num_heads)](
        q, k, v, out, of, starts, total, dots, by_q, tiles, scale, scale * LOG2_E, **sizes
    )
    _keys_kernel[(num_sequences * tiles, shape.num_kv_heads)](
        q, k, v, of, starts, total, dots, by_k, by_v, tiles, scale, scale * LOG2_E, **sizes
    )
    return by_q, by_k, by_v


def _tiles(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Launch options: rows of a program's own tile, and of the tiles that it reads in turn."""
    width = max(next_power_of_2(head_dim), 16)
    if dtype == torch.float32:
        # No tensor cores: tiles that fit in registers.
        return {"OWN": 32, "OTHER": 16, "WIDTH": width, "num_warps": 4, "num_stages": 1}
    own, other = (128, 64) if width <= 128 else (64, 32)
    return {"OWN": own, "OTHER": other, "WIDTH": width, "num_warps": 8, "num_stages": 2}


@triton.jit
def _place(starts, tiles, OWN: tl.constexpr):
    """The sequence of this program: its first row and length; and the first row of the tile."""
    sequence = tl.program_id(0) // tiles
    begin = tl.load(starts + sequence)
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    return begin, length, (tl.program_id(0) % tiles) * OWN


@triton.jit
def _rows(source, begin, row, length, head, HEADS: tl.constexpr, D: tl.constexpr, column):
    """One head of rows of a sequence: [rows, WIDTH]; absent elements are 0."""
    at = ((begin + row)[:, None] * HEADS + head) * D + column[None, :]
    return tl.load(source + at, (row < length)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _visible(query, key, length, WINDOW: tl.constexpr):
    """Whether queries see keys; both are broadcast."""
    seen = (key <= query) & (query < length)
    if WINDOW:
        seen &= query - key < WINDOW
    return seen


@triton.jit
def _dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _log_total(
    q_tile,  # [rows, WIDTH]
    query,  # [rows]
    k,
    begin,
    length,
    low,  # the keys that are seen: from low to last - 1
    last,
    kv_head,
    scale_log2,
    KV: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHER: tl.constexpr,
):
    """The base-2 logarithm of the sum of each query's softmax."""
    column = tl.arange(0, q_tile.shape[1])
    peak = tl.full([q_tile.shape[0]], _UNSEEN, tl.float32)
    weight = tl.zeros([q_tile.shape[0]], tl.float32)
    for start in range(low, last, OTHER):
        key = start + tl.arange(0, OTHER)
        k_tile = _rows(k, begin, key, length, kv_head, KV, D, column)
        seen = _visible(query[:, None], key[None, :], length, WINDOW)
        scores = tl.where(seen, _dot(q_tile, k_tile.T) * scale_log2, _UNSEEN)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weight *= tl.exp2(peak - higher)
        weight += tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
        peak = higher
    return peak + tl.log2(weight)


@triton.jit
def _queries_kernel(
    q,  # [T, HEADS, D]
    k,  # [T, HEADS / GROUP, D], as v
    v,
    out,  # [T, HEADS, D], as its gradient
    of,
    starts,  # [S + 1]
    total,  # [T, HEADS] fp32, written: base-2 logarithms of the softmax's sums
    dots,  # [T, HEADS] fp32, written: out * of, summed
    by_q,  # [T, HEADS, D], written
    tiles,  # of a sequence
    scale,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    begin, length, first = _place(starts, tiles, OWN)
    if first >= length:
        return
    head = tl.program_id(1)
    KV: tl.constexpr = HEADS // GROUP
    kv_head = head // GROUP
    column = tl.arange(0, WIDTH)
    query = first + tl.arange(0, OWN)
    q_tile = _rows(q, begin, query, length, head, HEADS, D, column)
    of_tile = _rows(of, begin, query, length, head, HEADS, D, column)
    out_tile = _rows(out, begin, query, length, head, HEADS, D, column)
    dot = tl.sum(out_tile.to(tl.float32) * of_tile.to(tl.float32), axis=1)
    last = tl.minimum(first + OWN, length)
    low = first * 0
    if WINDOW:
        low = tl.maximum(first - WINDOW + 1, 0) // OTHER * OTHER

    log_total = _log_total(
        q_tile, query, k, begin, length, low, last, kv_head, scale_log2, KV, D, WINDOW, OTHER
    )
    at = (begin + query) * HEADS + head
    tl.store(total + at, log_total, query < length)
    tl.store(dots + at, dot, query < length)

    acc = tl.zeros([OWN, WIDTH], tl.float32)
    for start in range(low, last, OTHER):
        key = start + tl.arange(0, OTHER)
        k_tile = _rows(k, begin, key, length, kv_head, KV, D, column)
        v_tile = _rows(v, begin, key, length, kv_head, KV, D, column)
        seen = _visible(query[:, None], key[None, :], length, WINDOW)
        scores = _dot(q_tile, k_tile.T) * scale_log2
        weights = tl.where(seen, tl.exp2(scores - log_total[:, None]), 0.0)
        by_scores = weights * (_dot(of_tile, v_tile.T) - dot[:, None])
        acc = _dot(by_scores.to(k_tile.dtype), k_tile, acc)
    at = ((begin + query)[:, None] * HEADS + head) * D + column[None, :]
    stored = (query < length)[:, None] & (column < D)[None, :]
    tl.store(by_q + at, (acc * scale).to(by_q.dtype.element_ty), stored)


@triton.jit
def _keys_kernel(
    q,  # as for _queries_kernel
    k,
    v,
    of,
    starts,
    total,
    dots,
    by_k,  # [T, HEADS / GROUP, D], written, as by_v
    by_v,
    tiles,
    scale,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    begin, length, first = _place(starts, tiles, OWN)
    if first >= length:
        return
    kv_head = tl.program_id(1)
    KV: tl.constexpr = HEADS // GROUP
    column = tl.arange(0, WIDTH)
    key = first + tl.arange(0, OWN)
    k_tile = _rows(k, begin, key, length, kv_head, KV, D, column)
    v_tile = _rows(v, begin, key, length, kv_head, KV, D, column)
    last = length
    if WINDOW:
        last = tl.minimum(length, first + OWN - 1 + WINDOW)
    acc_k = tl.zeros([OWN, WIDTH], tl.float32)
    acc_v = tl.zeros([OWN, WIDTH], tl.float32)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for start in range(first, last, OTHER):
            query = start + tl.arange(0, OTHER)
            q_tile = _rows(q, begin, query, length, head, HEADS, D, column)
            of_tile = _rows(of, begin, query, length, head, HEADS, D, column)
            at = (begin + query) * HEADS + head
            log_total = tl.load(total + at, query < length, other=0.0)
            dot = tl.load(dots + at, query < length, other=0.0)
            seen = _visible(query[None, :], key[:, None], length, WINDOW)
            scores = _dot(k_tile, q_tile.T) * scale_log2
            weights = tl.where(seen, tl.exp2(scores - log_total[None, :]), 0.0)
            acc_v = _dot(weights.to(of_tile.dtype), of_tile, acc_v)
            by_scores = weights * (_dot(v_tile, of_tile.T) - dot[None, :])
            acc_k = _dot(by_scores.to(q_tile.dtype), q_tile, acc_k)
    at = ((begin + key)[:, None] * KV + kv_head) * D + column[None, :]
    stored = (key < length)[:, None] & (column < D)[None, :]
    tl.store(by_k + at, (acc_k * scale).to(by_k.dtype.element_ty), stored)
    tl.store(by_v + at, acc_v.to(by_v.dtype.element_ty), stored)

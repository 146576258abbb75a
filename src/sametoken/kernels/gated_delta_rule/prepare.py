"""The short convolution, the norms of q and k, and the gates of a pass's rows, on a GPU.

The references are ``causal_conv1d.reference`` and, for what follows it, ``reference``.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sametoken.kernels.gated_delta_rule.operands import LayerMemory, RawRows, sizes
from sametoken.kernels.gated_delta_rule.reference import NORM_EPS
from sametoken.kernels.gated_delta_rule.runs import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    NUM_FOLDED,
    NUM_ROWS,
    SLOT,
    Runs,
    raw_row,
)
from sametoken.kernels.overlap import overlapped, wait_for_earlier

_EPS = tl.constexpr(NORM_EPS)
_MAX_LANES = 64


@triton.jit
def _sigmoid(x):
    """Without overflow on either side."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1.0 + power)


@triton.jit
def _decay(a, A_log, dt_bias):
    shifted = a + dt_bias.to(tl.float32)
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    return tl.exp(-tl.exp(A_log.to(tl.float32)) * softplus)


@triton.jit
def _convolved(
    t,  # place among folded and new rows
    qkv, history, pending, first_row, num_folded, qkv_stride, channel, inside, empty,
    conv_weight,  # [C, K]
    conv_bias,  # [C] or None
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution at a row, for some channels: [BLOCK] fp32."""
    summed = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        index = t + tap
        raw = raw_row(index, qkv, history, pending, first_row, num_folded, qkv_stride, C, K - 1)
        # What came before a request's first row is zero.
        exists = inside & ((index >= K - 1) | (empty == 0))
        x = tl.load(raw + channel, exists, other=0.0).to(tl.float32)
        summed += x * tl.load(conv_weight + channel * K + tap, inside, other=0.0).to(tl.float32)
    if conv_bias is not None:
        summed += tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    return summed * _sigmoid(summed)


@triton.jit(do_not_specialize=["max_pending"])
def _prepare_kernel(
    qkv,  # [T, C], rows qkv_stride apart
    a,  # [T, HV], rows a_stride apart
    b,  # [T, HV], rows b_stride apart
    history,  # [S, K - 1, C]
    pending_qkv,  # [S, P, C]
    pending_gates,  # [S, P, 2 * HV]
    A_log,  # [HV]
    dt_bias,  # [HV]
    conv_weight,  # [C, K]
    conv_bias,  # [C] or None
    runs,  # [B, FIELDS]
    prepared,  # [T + B * P, C + 2 * HV], written
    qkv_stride,
    a_stride,
    b_stride,
    max_pending,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    C: tl.constexpr = 2 * HK * DK + HV * DV
    WIDTH: tl.constexpr = C + 2 * HV
    TAPS: tl.constexpr = K - 1
    unit = tl.program_id(0)
    is_value = unit >= 2 * HK
    head = unit - 2 * HK
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(is_value, DV, DK)
    channel = tl.where(is_value, 2 * HK * DK + head * DV, unit * DK) + column

    wait_for_earlier(OVERLAP)
    run = tl.program_id(2).to(tl.int64)
    field = runs + run * FIELDS
    slot, first_row = tl.load(field + SLOT), tl.load(field + FIRST_ROW)
    num_rows, num_folded = tl.load(field + NUM_ROWS), tl.load(field + NUM_FOLDED)
    empty = tl.load(field + EMPTY) != 0
    total = tl.where(num_rows > 0, num_folded + num_rows, 0).to(tl.int32)
    history += slot * TAPS * C
    pending_qkv += slot * max_pending * C
    pending_gates += slot * max_pending * 2 * HV
    prepared += (first_row + run * max_pending) * WIDTH
    for t in range(tl.program_id(1), total, tl.num_programs(1)):
        mixed = _convolved(
            t, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, channel, inside,
            empty, conv_weight, conv_bias, C, K, BLOCK,
        )  # fmt: skip
        if is_value:
            row = first_row + t - num_folded
            is_new = t >= num_folded
            held = pending_gates + t * 2 * HV + head
            raw_a = tl.load(tl.where(is_new, a + row * a_stride + head, held)).to(tl.float32)
            raw_b = tl.load(tl.where(is_new, b + row * b_stride + head, held + HV)).to(tl.float32)
            gate = prepared + t * WIDTH + C + head
            tl.store(gate, _decay(raw_a, tl.load(A_log + head), tl.load(dt_bias + head)))
            tl.store(gate + HV, _sigmoid(raw_b))
        else:
            scale = tl.rsqrt(tl.sum(mixed * mixed, axis=0) + _EPS)
            mixed = mixed * tl.where(unit < HK, scale * DK**-0.5, scale)
        tl.store(prepared + t * WIDTH + channel, mixed, inside)


def prepare(runs: Runs, spec: Any, params: Any, raw: RawRows, memory: LayerMemory) -> Tensor:
    """What the rule reads of each run's folded rows and rows: [T + B * k, C + 2 * Hv] fp32.

    A row is [q | k | v | decay | beta], q and k normalised, q scaled by 1 / sqrt(Dk). Run b
    starts k * b rows behind its first row. Arguments are those of ``triton.advance``.
    """
    weights = (params.A_log, params.dt_bias, params.conv_weight, params.conv_bias)
    assert all(weight is None or weight.is_contiguous() for weight in weights)
    assert raw.qkv.shape[1] == spec.conv_channels == memory.history.shape[2]
    batch, heads = runs.table.shape[0], spec.num_value_heads
    num_rows = raw.qkv.shape[0] + batch * memory.max_pending
    prepared = memory.states.new_empty(num_rows, spec.conv_channels + 2 * heads)
    lanes = min(runs.max_rows + memory.max_pending, _MAX_LANES)
    _prepare_kernel[(2 * spec.num_key_heads + heads, lanes, batch)](
        raw.qkv,
        raw.a,
        raw.b,
        memory.history,
        memory.pending_qkv,
        memory.pending_gates,
        *weights,
        runs.table,
        prepared,
        *raw.strides,
        memory.max_pending,
        **sizes(spec),
        BLOCK=triton.next_power_of_2(max(spec.key_dim, spec.value_dim)),
        num_warps=1,
        **overlapped(prepared),
    )
    return prepared

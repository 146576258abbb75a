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
    fact,
    raw_row,
)
from sametoken.kernels.overlap import overlapped, release_next, wait

_EPS = tl.constexpr(NORM_EPS)
# Programs that fill a large GPU; with more rows than that each one runs several.
_PROGRAMS = 8192


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
def _taps(
    conv_weight,  # [C, K]
    channel,
    inside,
    K: tl.constexpr,
):
    """The convolution's weights of some channels: K times fp32 of the channels' shape."""
    taps = ()
    for tap in tl.static_range(K):
        weight = tl.load(conv_weight + channel * K + tap, inside, other=0.0)
        taps += (weight.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def _raw_rows(
    t,  # place among folded and new rows
    qkv, history, pending, first_row, num_folded, qkv_stride, channel, inside, empty,
    C: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """What the convolution reads at a row, of some channels: K times fp32 of their shape."""
    rows = ()
    for tap in tl.static_range(K):
        index = t + tap
        raw = raw_row(index, qkv, history, pending, first_row, num_folded, qkv_stride, C, K - 1)
        # What came before a request's first row is zero.
        exists = (index >= K - 1) | (empty == 0)
        rows += (tl.load(raw + channel, exists & inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _convolved(raw, taps, conv_bias, channel, inside, K: tl.constexpr):
    """SiLU of the convolution of raw rows, taps in order: fp32 of the channels' shape."""
    summed = raw[0] * taps[0]
    for tap in tl.static_range(1, K):
        summed = tl.fma(raw[tap], taps[tap], summed)
    if conv_bias is not None:
        summed += tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    return summed * _sigmoid(summed)


@triton.jit
def _store_gates(gate, raw_a, raw_b, A_log, dt_bias, HV: tl.constexpr):
    """Decay and beta of a head, HV apart, from the raw gates at two addresses."""
    tl.store(gate, _decay(tl.load(raw_a).to(tl.float32), A_log, dt_bias))
    tl.store(gate + HV, _sigmoid(tl.load(raw_b).to(tl.float32)))


@triton.jit
def _prepare_row(
    t,  # place among folded and new rows
    row,  # [C + 2 * HV + HK], written
    qkv, a, b, history, pending_qkv, pending_gates, A_log, dt_bias, conv_bias,
    first_row, num_folded, empty, qkv_stride, a_stride, b_stride,
    is_keys, head, channel, inside, taps, k_taps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One key head's q, k and q . k of one row, or one value head's v, decay and beta."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    k_channel = channel + HK * DK
    # Both loads before either is waited for.
    raw = _raw_rows(
        t, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, channel, inside,
        empty, C, K,
    )  # fmt: skip
    k_raw = _raw_rows(
        t, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, k_channel,
        inside & is_keys, empty, C, K,
    )  # fmt: skip
    mixed = _convolved(raw, taps, conv_bias, channel, inside, K)
    if is_keys:
        k = _convolved(k_raw, k_taps, conv_bias, k_channel, inside, K)
        scale = tl.rsqrt(tl.sum(mixed * mixed, axis=0) + _EPS) * DK**-0.5
        k_scale = tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        q_k = tl.sum(mixed * k, axis=0) * scale * k_scale
        mixed *= scale
        tl.store(row + k_channel, k * k_scale, inside)
        tl.store(row + C + 2 * HV + head, q_k)
    else:
        new = first_row + t - num_folded
        is_new = t >= num_folded
        held = pending_gates + t * 2 * HV + head
        _store_gates(
            row + C + head,
            tl.where(is_new, a + new * a_stride + head, held),
            tl.where(is_new, b + new * b_stride + head, held + HV),
            tl.load(A_log + head), tl.load(dt_bias + head), HV,
        )  # fmt: skip
    tl.store(row + channel, mixed, inside)


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
    prepared,  # [T + B * P, C + 2 * HV + HK], written
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
    # The rule's kernel may load states from now on.
    release_next(OVERLAP)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    WIDTH: tl.constexpr = C + 2 * HV + HK
    TAPS: tl.constexpr = K - 1
    run = tl.program_id(2).to(tl.int64)
    field = runs + run * FIELDS
    # A unit is a key head, its q and its k, or a value head.
    unit, column = tl.program_id(0), tl.arange(0, BLOCK)
    is_keys = unit < HK
    head = tl.where(is_keys, unit, unit - HK)
    width = tl.where(is_keys, DK, DV)
    inside = column < width
    channel = tl.where(is_keys, 0, 2 * HK * DK) + head * width + column
    k_channel = channel + HK * DK
    # Weights are nobody's to write, and the table was whole before this kernel began
    # (``plan_runs``): they come before the wait.
    taps = _taps(conv_weight, channel, inside, K)
    k_taps = _taps(conv_weight, k_channel, inside & is_keys, K)
    slot, first_row = fact(field, SLOT), fact(field, FIRST_ROW)
    num_rows, num_folded = fact(field, NUM_ROWS), fact(field, NUM_FOLDED)
    empty = fact(field, EMPTY) != 0

    wait(OVERLAP)
    total = tl.where(num_rows > 0, num_folded + num_rows, 0).to(tl.int32)
    history += slot * TAPS * C
    pending_qkv += slot * max_pending * C
    pending_gates += slot * max_pending * 2 * HV
    prepared += (first_row + run * max_pending) * WIDTH
    for t in range(tl.program_id(1), total, tl.num_programs(1)):
        _prepare_row(
            t, prepared + t * WIDTH, qkv, a, b, history, pending_qkv, pending_gates, A_log, dt_bias,
            conv_bias, first_row, num_folded, empty, qkv_stride, a_stride, b_stride,
            is_keys, head, channel, inside, taps, k_taps, HK, HV, DK, DV, K,
        )  # fmt: skip


def prepare(runs: Runs, spec: Any, params: Any, raw: RawRows, memory: LayerMemory) -> Tensor:
    """What the rule reads of each run's folded rows and rows: fp32 [T + B * k, C + 2 * Hv + Hk].

    A row is [q | k | v | decay | beta | q . k], q and k normalised, q scaled by 1 / sqrt(Dk).
    Run b starts k * b rows behind its first row. Arguments are those of ``triton.advance``.
    """
    weights = (params.A_log, params.dt_bias, params.conv_weight, params.conv_bias)
    assert all(weight is None or weight.is_contiguous() for weight in weights)
    assert raw.qkv.shape[1] == spec.conv_channels == memory.history.shape[2]
    batch, heads = runs.table.shape[0], spec.num_value_heads
    num_rows = raw.qkv.shape[0] + batch * memory.max_pending
    units = spec.num_key_heads + heads
    prepared = memory.states.new_empty(num_rows, spec.conv_channels + heads + units)
    lanes = min(runs.max_rows + memory.max_pending, max(1, _PROGRAMS // max(1, units * batch)))
    _prepare_kernel[(units, lanes, batch)](
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

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
from sametoken.kernels.overlap import overlapped, wait_then_release

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
    TAPS_BLOCK: tl.constexpr,
):
    """The convolution's weights of some channels: [TAPS_BLOCK, BLOCK] fp32."""
    tap = tl.arange(0, TAPS_BLOCK)[:, None]
    return tl.load(conv_weight + channel * K + tap, inside & (tap < K), other=0.0).to(tl.float32)


@triton.jit
def _raw_rows(
    t,  # place among folded and new rows
    qkv, history, pending, first_row, num_folded, qkv_stride, channel, inside, empty,
    C: tl.constexpr,
    K: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
):  # fmt: skip
    """What the convolution reads at a row, of some channels: [TAPS_BLOCK, BLOCK] fp32."""
    tap = tl.arange(0, TAPS_BLOCK)
    index = t + tap
    raw = raw_row(index, qkv, history, pending, first_row, num_folded, qkv_stride, C, K - 1)
    # What came before a request's first row is zero.
    exists = (tap < K) & ((index >= K - 1) | (empty == 0))
    return tl.load(raw[:, None] + channel, exists[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def _convolved(raw, taps, conv_bias, channel, inside):
    """SiLU of the convolution of raw rows [TAPS_BLOCK, BLOCK]: [BLOCK] fp32."""
    summed = tl.sum(raw * taps, axis=0)
    if conv_bias is not None:
        summed += tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    return summed * _sigmoid(summed)


@triton.jit
def _store_gates(gate, raw_a, raw_b, A_log, dt_bias, HV: tl.constexpr):
    """Decay and beta of a head, HV apart, from the raw gates at two addresses."""
    tl.store(gate, _decay(tl.load(raw_a).to(tl.float32), A_log, dt_bias))
    tl.store(gate + HV, _sigmoid(tl.load(raw_b).to(tl.float32)))


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
    TAPS_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    C: tl.constexpr = 2 * HK * DK + HV * DV
    WIDTH: tl.constexpr = C + 2 * HV + HK
    TAPS: tl.constexpr = K - 1
    unit = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    # A unit is a key head, its q and its k, or a value head.
    is_keys, head = unit < HK, tl.maximum(unit - HK, 0)
    inside = column < tl.where(is_keys, DK, DV)
    channel = tl.where(is_keys, unit * DK, 2 * HK * DK + head * DV) + column
    k_channel = channel + HK * DK
    # Weights are nobody's to write: they come before the wait.
    taps = _taps(conv_weight, channel, inside, K, TAPS_BLOCK)
    k_taps = _taps(conv_weight, k_channel, inside & is_keys, K, TAPS_BLOCK)

    wait_then_release(OVERLAP)
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
        row = prepared + t * WIDTH
        # Both loads before either is waited for.
        raw = _raw_rows(
            t, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, channel, inside,
            empty, C, K, TAPS_BLOCK,
        )  # fmt: skip
        k_raw = _raw_rows(
            t, qkv, history, pending_qkv, first_row, num_folded, qkv_stride, k_channel,
            inside & is_keys, empty, C, K, TAPS_BLOCK,
        )  # fmt: skip
        mixed = _convolved(raw, taps, conv_bias, channel, inside)
        if is_keys:
            k = _convolved(k_raw, k_taps, conv_bias, k_channel, inside)
            scale = tl.rsqrt(tl.sum(mixed * mixed, axis=0) + _EPS) * DK**-0.5
            k_scale = tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
            q_k = tl.sum(mixed * k, axis=0) * scale * k_scale
            mixed *= scale
            tl.store(row + k_channel, k * k_scale, inside)
            tl.store(row + C + 2 * HV + unit, q_k)
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
        TAPS_BLOCK=triton.next_power_of_2(spec.conv_kernel),
        num_warps=1,
        **overlapped(prepared),
    )
    return prepared
